//go:build long

package poweroff

import (
	"testing"
	"time"
)

// The disk takes longer than all limits of a power-off together, each of which applies only to a
// disk that answers nothing.
func TestPID1WaitsForASlowDiskForAsLongAsItTakes(t *testing.T) {
	endsWithAllUnsynced(t, 60*time.Second)
}
