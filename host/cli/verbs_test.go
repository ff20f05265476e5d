package cli

import (
	"os"
	"strings"
	"testing"
)

func TestEveryVerbHasAHelpAnExampleAndAPlaceInTheREADME(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range New().Commands() {
		call := "directvol " + verb.Name()
		for what, there := range map[string]bool{
			"a Long that says more than Short": len(verb.Long) > len(verb.Short),
			"an Example with " + call:          strings.Contains(verb.Example, call+" "),
			"a place in README.md":             strings.Contains(string(readme), call+" "),
		} {
			if !there {
				t.Errorf("%s\nwant %s\ngot  none", call, what)
			}
		}
	}
}
