package sandbox

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/directvol/directvol/host/trial"
)

func TestStoreHasTenSecondsToAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		try := tried(func(_ context.Context, _ string, limit time.Duration) error {
			<-time.After(limit)
			return trial.ErrHangs
		})
		began := time.Now()
		if err := try(t.Context(), "store"); !errors.Is(err, ErrStoreHangs) || time.Since(began) != trialLimit {
			t.Errorf("want %v after %v\ngot  %v after %v", ErrStoreHangs, trialLimit, err, time.Since(began))
		}
	})
}
