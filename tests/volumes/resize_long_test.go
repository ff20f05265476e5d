//go:build long

package volumes

import "testing"

func TestTwoGrowersNeverShrinkAnXFSInMinutes(t *testing.T) { growsBesideAnother(t, 1500) }
