package volume

import (
	"cmp"
	"context"
	"time"

	"github.com/directvol/directvol/agent/mount"
)

// forCaller is longer than any caller waits.
const forCaller = 24 * time.Hour

// Grow is Resize with progress, which waits for the disk's size until shortly before ctx's
// deadline: it calls report after each step, whichever call grows the volume, and at the end. If
// report fails, the growth stops between two steps.
func (t *Table) Grow(ctx context.Context, path string, size uint64, report func(Progress) error) error {
	if r, err := rawAt(ctx, path); err != nil || r != nil {
		if err == nil {
			err = r.grow(ctx, size, report)
		}
		return err
	}
	v, err := t.Lookup(path)
	if err != nil {
		return err
	}
	from := v.Report().FilesystemBytes // 0 if it is not known yet
	one, leave := t.watchers.join(v.Mountpoint)
	defer leave()
	growing, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	reported := make(chan struct{})
	go func() {
		defer close(reported)
		err := t.follow(growing, one, func(p Progress) error {
			from = p.From
			return report(p)
		})
		if err != nil {
			cancel(err)
		}
	}()
	err = v.Resize(growing, size, forCaller)
	failed := context.Cause(growing)
	cancel(nil)
	<-reported
	if failed != nil && ctx.Err() == nil {
		return failed
	}
	if err != nil {
		return err
	}
	end := v.Report().FilesystemBytes
	return report(Progress{From: cmp.Or(from, end), Now: end, Goal: end})
}

// follow reports the steps of a volume's growth until ctx ends. It returns the error of report.
func (t *Table) follow(ctx context.Context, one *watcher, report func(Progress) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-one.ready:
		}
		events, _ := t.watchers.take(one) // the next step says more than a lost one
		for _, e := range events {
			if e.Report.Growth == nil {
				continue
			}
			if err := report(*e.Report.Growth); err != nil {
				return err
			}
		}
	}
}

// grows sets the progress of the growth; nil ends it.
func (v *Volume) grows(p *Progress) {
	v.mu.Lock()
	v.progress = p
	v.mu.Unlock()
	v.watchers.changed(v)
}

// endsAt notes where the filesystem ends, in bytes.
func (v *Volume) endsAt(end uint64) {
	v.mu.Lock()
	v.end = max(v.end, end)
	v.mu.Unlock()
}

// seenAs notes a mount's options as mountinfo shows them now.
func (v *Volume) seenAs(m *mount.Info) {
	readOnly := isReadOnly(m)
	v.mu.Lock()
	was := v.readOnly
	v.readOnly = readOnly
	v.mu.Unlock()
	if was != readOnly {
		v.watchers.changed(v)
	}
}
