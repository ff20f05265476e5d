package sandbox

import (
	"regexp"
	"testing"
)

func TestContainerIDsAreThoseOfTheirPattern(t *testing.T) {
	pattern := regexp.MustCompile(containerID)
	check := func(id string) {
		if got, want := isContainerID(id), pattern.MatchString(id); got != want {
			t.Errorf("%q\nwant %v\ngot  %v", id, want, got)
		}
	}
	check("")
	for b := range 256 {
		one := string([]byte{byte(b)})
		for _, id := range []string{one, "a" + one, one + "a", "ab" + one, "a" + one + "b", one + one} {
			check(id)
		}
	}
}
