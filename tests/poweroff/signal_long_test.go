//go:build long

package poweroff

import (
	"testing"
	"time"
)

// Longer than all limits of an end together, each of which is of a disk that is silent.
func TestPID1WaitsForASlowDiskForAsLongAsItTakes(t *testing.T) {
	endsWithAllUnsynced(t, 60*time.Second)
}
