package experiments

import (
	"os"
	"regexp"
	"testing"
)

// specification is the page with the promises that rows of the bench hold.
const specification = "../../../docs/SPECIFICATION.md"

func TestRowsOfTheSpecificationAreMeasured(t *testing.T) {
	text, err := os.ReadFile(specification)
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]string{}
	for _, l := range Lines() {
		targets[l.Name] = l.Goal.String()
	}
	named := regexp.MustCompile("row `([^`]+)`").FindAllStringSubmatch(string(text), -1)
	if len(named) == 0 {
		t.Errorf("%s names no row", specification)
	}
	for _, row := range named {
		if _, ok := targets[row[1]]; !ok {
			t.Errorf("row %s\nwant one that is measured\ngot  none of that name", row[1])
		}
	}
	promised := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| ([≤≥] [0-9.,]+) \\|").FindAllStringSubmatch(string(text), -1) {
		promised[row[1]] = row[2]
		if targets[row[1]] != row[2] {
			t.Errorf("target of %s\nwant %s\ngot  %s", row[1], targets[row[1]], row[2])
		}
	}
	for name, target := range targets {
		if regexp.MustCompile("^[≤≥] [0-9]").MatchString(target) && promised[name] == "" {
			t.Errorf("%s has the target %s, and no row of the specification", name, target)
		}
	}
}
