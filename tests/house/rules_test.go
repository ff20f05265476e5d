package house

import (
	"os"
	"testing"
)

// rule returns a line for each violation.
type rule func(*tree) []string

// rules are all rules, by name. Each also needs an entry in violations.
var rules = map[string]rule{
	"only the rooms at the top":             onlyRooms,
	"rooms import what the table says":      roomImports,
	"the agent's packages import below":     importsAbove,
	"programs start by package program":     programsAlike,
	"packages say what they are":            packageComments,
	"exported identifiers have a contract":  exportedComments,
	"comments wrap at 100 columns":          wrappedComments,
	"names say what a thing is":             forbiddenNames,
	"functions fit a screen":                shortFunctions,
	"nothing is waited for by sleeping":     noSleep,
	"one place knows mounts by number":      mountsByNumber,
	"conditions are made in one place":      conditionsAreMadeInHealth,
	"a skipped test says why":               skipsSayWhy,
	"go.mod names Go's version and no more": goVersion,
	"modules build on this tree":            modulesBuildOnThisTree,
	"every dependency is explained":         dependenciesExplained,
	"links lead somewhere":                  linksLead,
	"README's program is the Example":       readmeProgram,
	"each promise is held by something":     promisesAreHeld,
	"the specification is the code's":       specified,
}

// top is the top of the checkout, relative to this package's folder, where go test runs.
const top = "../.."

func TestHouseRules(t *testing.T) {
	checkout := load(t, os.DirFS(top))
	if len(checkout.sources) == 0 {
		t.Fatalf("no Go file under %s", top)
	}
	for name, broken := range rules {
		t.Run(name, func(t *testing.T) {
			for _, line := range broken(checkout) {
				t.Error(line)
			}
		})
	}
}
