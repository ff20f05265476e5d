package deadline

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// The answer has 200 ms to arrive, or a quarter of the time if that is less.
func TestTimeForTheAnswerIsReserved(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{
		time.Minute: time.Minute - margin, 4 * margin: 3 * margin, 400 * time.Millisecond: 300 * time.Millisecond, 0: 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			early, end := Early(ctx)
			defer end()
			if <-early.Done(); time.Since(began) != want {
				t.Errorf("of %v\nwant it to end after %v\ngot  %v", limit, want, time.Since(began))
			}
		})
	}
	if early, end := Early(t.Context()); early.Err() != nil {
		t.Error("a call without a deadline has ended")
	} else if _, limited := early.Deadline(); limited {
		t.Error("a call without a deadline has got one")
	} else {
		end()
	}
}

func TestAwakeEndsAtItsLimitOrWithItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, end := Awake(t.Context(), time.Second)
		defer end()
		if <-ctx.Done(); time.Since(began) != time.Second || context.Cause(ctx) != context.DeadlineExceeded {
			t.Errorf("want the end after a second\ngot  it after %v, %v", time.Since(began), context.Cause(ctx))
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		ctx, end = Awake(short, time.Second)
		defer end()
		began = time.Now()
		if <-ctx.Done(); time.Since(began) != time.Millisecond || ctx.Err() != context.DeadlineExceeded {
			t.Errorf("want the caller's end after a millisecond\ngot  it after %v, %v", time.Since(began), ctx.Err())
		}
	})
}

// stopped makes this program wait by Awake, and say how long that took.
const stopped = "DIRECTVOL_TEST_STOPPED"

func TestMain(m *testing.M) {
	if limit, err := time.ParseDuration(os.Getenv(stopped)); err == nil {
		began := time.Now()
		ctx, end := Awake(context.Background(), limit)
		defer end()
		fmt.Println("waits")
		<-ctx.Done()
		fmt.Println(time.Since(began))
		return
	}
	os.Exit(m.Run())
}

// A process that was stopped for longer than its limit still waits for nearly all of it afterwards.
func TestTimeInWhichNothingRunsHardlyCounts(t *testing.T) {
	const limit, stop = time.Second, 3 * time.Second / 2
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), stopped+"="+limit.String())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	<-time.After(stop)
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	lines.Scan()
	took, err := time.ParseDuration(lines.Text())
	if waited := cmd.Wait(); err != nil || waited != nil {
		t.Fatalf("it says %q: %v, %v", lines.Text(), err, waited)
	}
	if least := stop + limit*(awakeParts-1)/awakeParts; took < least {
		t.Errorf("stopped for %v\nwant it to wait for %v or more\ngot  %v", stop, least, took)
	}
}
