//go:build long

package churn

import (
	"testing"
	"time"
)

func TestVolumesComeAndGoAsPromisedForHours(t *testing.T) { churned(t, 2*time.Hour) }
