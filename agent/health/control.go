package health

import "context"

// start starts the goroutine that looks. The caller holds control, or is the only one that knows
// the watch.
func (w *Watch) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel, w.done = cancel, make(chan struct{})
	go w.run(ctx, w.done)
}

// Pause stops the watch from looking, so that the filesystem can be grown, frozen or unmounted. The
// checks that do not access the disk go on. Pause fails if a probe in flight does not return before
// ctx ends; then the watch goes on.
func (w *Watch) Pause(ctx context.Context) error {
	w.control.Lock()
	defer w.control.Unlock()
	if w.hold() {
		w.paused.Store(true)
		w.monitor.pulse.stir() // the caller may wait for the device
		return nil
	}
	w.cancel()
	<-w.done
	w.paused.Store(true)
	w.monitor.pulse.stir()
	if w.inFlight == nil {
		return nil
	}
	select {
	case f := <-w.inFlight.answer:
		w.took(f)
		return nil
	case <-ctx.Done():
		w.paused.Store(false)
		if !w.ended.Load() {
			w.start()
		}
		return ctx.Err()
	}
}

// PauseAtOnce is Pause for a watch that is only waiting for its next look. If there is anything to
// wait for, it does nothing and returns false.
func (w *Watch) PauseAtOnce() bool {
	if !w.control.TryLock() {
		return false
	}
	defer w.control.Unlock()
	w.paused.Store(w.hold())
	w.monitor.pulse.stir()
	return w.paused.Load()
}

// Resume makes a paused watch look again, with all that it knew, unless it was ended meanwhile.
func (w *Watch) Resume() {
	w.control.Lock()
	defer w.control.Unlock()
	w.paused.Store(false)
	if w.ended.Load() {
		return
	}
	if now, _ := w.Latest(); len(now) > 0 { // the call that has paused the watch may have cleared them
		w.poke()
	}
	if w.release() {
		return
	}
	<-w.done // End may have cancelled it since
	w.start()
}

// hold keeps a waiting goroutine from its next look until release, and reports whether it was
// waiting. Ending the goroutine and starting another one after a growth would take longer than all
// else that the agent does for the growth. control is held.
func (w *Watch) hold() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waits {
		w.held = make(chan struct{})
	}
	return w.waits
}

// release lets a held goroutine continue, and reports whether one was held. control is held.
func (w *Watch) release() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held == nil {
		return false
	}
	close(w.held)
	w.held = nil
	return true
}

// End ends the watch without blocking. A probe in flight goes on by itself.
func (w *Watch) End() {
	w.monitor.remove(w)
	w.endMonitor()
	w.ended.Store(true)
	go w.settle()
}

// Rest stops the watch from looking while its mount is out of sight, until End or Again. The watch
// still processes the kernel's log. Rest does not block.
func (w *Watch) Rest() {
	w.monitor.add(w) // lose may have removed it
	w.ended.Store(true)
	go w.settle()
}

// Again restarts a watch after Rest or End, with all that it knew, when its mount is in sight
// again. The watch waits for a probe that is still in flight. Again does not block.
func (w *Watch) Again() {
	w.ended.Store(false)
	w.monitor.add(w)
	w.poke()
	go w.settle()
}

// settle starts or stops the goroutine according to the last call of End, Rest or Again.
func (w *Watch) settle() {
	w.control.Lock()
	defer w.control.Unlock()
	w.cancel()
	w.release()
	if w.ended.Load() || w.paused.Load() {
		return
	}
	<-w.done
	w.start()
}
