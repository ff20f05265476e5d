package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// watch follows the guest's volumes during the demo, on a connection of its own. It makes a line of
// each change of a size or of the conditions.
type watch struct {
	mu     sync.Mutex
	step   time.Time // when the running step began
	lines  []string  // not yet printed
	latest map[string]*volumepb.Volume
	news   chan struct{} // is closed at the next event, and at the watch's end
	err    error         // that has ended the watch
}

// startWatch begins a watch, which ends with ctx or with the guest.
func startWatch(ctx context.Context, guest *vm.Guest) *watch {
	w := &watch{step: time.Now(), latest: map[string]*volumepb.Volume{}, news: make(chan struct{})}
	go func() {
		for event, err := range guest.Agent().WatchVolumes(ctx) {
			w.take(event, err)
		}
	}()
	return w
}

func (w *watch) take(event *volumepb.VolumeEvent, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err = err; err == nil && event.Volume != nil {
		path := event.Volume.VolumeGuestPath
		before, known := w.latest[path]
		if event.Type == volumepb.VolumeEvent_REMOVED {
			delete(w.latest, path)
		} else {
			w.latest[path] = event.Volume
			examined := known && (before.FilesystemBytes > 0 || len(event.Volume.Conditions) > 0) // a mount's size is no change
			if now := describe(event.Volume); examined && now != describe(before) {
				w.lines = append(w.lines, fmt.Sprintf("a watch, %.1f s into it: %s", time.Since(w.step).Seconds(), now))
			}
		}
	}
	close(w.news)
	w.news = make(chan struct{})
}

// describe returns what a line shows of a volume.
func describe(v *volumepb.Volume) string {
	var reasons []string
	for _, c := range v.Conditions {
		reasons = append(reasons, c.Status.String()+" "+c.Reason)
	}
	if reasons == nil {
		reasons = []string{"healthy"}
	}
	return fmt.Sprintf("%s has %v, %s", v.Filesystem, output.Size(v.FilesystemBytes), strings.Join(reasons, ", "))
}

// begin returns the lines of the step that has ended, and begins the next one.
func (w *watch) begin() (lines []string) {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	lines, w.lines, w.step = w.lines, nil, time.Now()
	return lines
}

// await returns when the watch has seen a volume as wanted.
func (w *watch) await(ctx context.Context, v volume, wanted func(*volumepb.Volume) bool) error {
	for {
		w.mu.Lock()
		latest, news, err := w.latest[v.GuestPath], w.news, w.err
		w.mu.Unlock()
		switch {
		case err != nil:
			return fmt.Errorf("the watch has ended: %w", err)
		case latest != nil && wanted(latest):
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("the watch shows %v: %w", latest, ctx.Err())
		}
	}
}
