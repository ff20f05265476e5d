package flight

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Every caller is answered in time, by a single question.
func TestHungQuestionIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var flights Flights[string, int]
		answers, asked := make(chan int), 0
		ask := func() int { asked++; return <-answers }
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if got, ok := flights.Ask(ctx, "disk", ask); ok {
				t.Errorf("want no answer\ngot  %d", got)
			}
			cancel()
		}
		if got, ok := flights.Ask(t.Context(), "other", func() int { return 7 }); got != 7 || !ok {
			t.Errorf("another question\nwant 7\ngot  %d, %v", got, ok)
		}
		go func() { answers <- 3 }()
		if got, ok := flights.Ask(t.Context(), "disk", ask); got != 3 || !ok || asked != 1 {
			t.Errorf("want 3, asked once\ngot  %d, %v, asked %d times", got, ok, asked)
		}
		if got, ok := flights.Ask(t.Context(), "disk", func() int { return 4 }); got != 4 || !ok {
			t.Errorf("asked anew\nwant 4\ngot  %d, %v", got, ok)
		}
	})
}

// A caller of Anew never gets an answer whose question is older than the call.
func TestNewQuestionIsNotAnsweredByAnOlderOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var flights Flights[string, int]
		first := make(chan int)
		go flights.Ask(t.Context(), "disk", func() int { return <-first })
		synctest.Wait()
		answer := make(chan int)
		asked := 0
		go func() {
			got, _ := flights.Anew(t.Context(), "disk", func() int { asked++; return 2 })
			answer <- got
		}()
		synctest.Wait()
		first <- 1
		if got := <-answer; got != 2 || asked != 1 {
			t.Errorf("want 2, asked once\ngot  %d, asked %d times", got, asked)
		}
		if got, ok := flights.Anew(t.Context(), "disk", func() int { asked++; return 3 }); got != 3 || !ok || asked != 2 {
			t.Errorf("alone\nwant 3, asked once more\ngot  %d, asked %d times", got, asked)
		}
	})
}
