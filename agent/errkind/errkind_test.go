package errkind

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"
)

func TestKindSurvivesWrappingAndKeepsItsCause(t *testing.T) {
	inner := New(NotFound, "volume /a: %w", fs.ErrNotExist)
	err := fmt.Errorf("stats: %w", inner)
	if got := Of(err); got != NotFound {
		t.Errorf("kind\nwant %v\ngot  %v", NotFound, got)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the cause is lost: %v", err)
	}
}

func TestErrorWithoutAKindIsInternal(t *testing.T) {
	if got := Of(errors.New("x")); got != Internal {
		t.Errorf("kind\nwant %v\ngot  %v", Internal, got)
	}
}
