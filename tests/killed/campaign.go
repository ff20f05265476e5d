package killed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/vm"
)

// settings are the parameters of a campaign.
type settings struct {
	seed  uint64
	count int
	set   string   // of types of filesystem
	only  []target // killed in turn; if empty, chosen at random
}

// fromEnvironment reads the settings of a manual run.
func fromEnvironment(count int, only []target, set string) (s settings, err error) {
	s.only = only
	s.set = cmp.Or(os.Getenv("KILLED_FORMATS"), set)
	if _, ok := sets[s.set]; !ok {
		return s, fmt.Errorf("KILLED_FORMATS=%q: want usual or others", s.set)
	}
	if s.seed, err = strconv.ParseUint(cmp.Or(os.Getenv("KILLED_SEED"), strconv.FormatUint(rand.Uint64N(1<<32), 10)), 10, 64); err != nil {
		return s, fmt.Errorf("KILLED_SEED: want a number: %w", err)
	}
	s.count, err = strconv.Atoi(cmp.Or(os.Getenv("KILLED_COUNT"), strconv.Itoa(count)))
	if err != nil || s.count < 1 {
		return s, fmt.Errorf("KILLED_COUNT=%q: want a number from 1 on", os.Getenv("KILLED_COUNT"))
	}
	if named := target(os.Getenv("KILLED_TARGET")); named != "" {
		if !slices.Contains(targets, named) {
			return s, fmt.Errorf("KILLED_TARGET=%q: want one of %v", named, targets)
		}
		s.only = []target{named}
	}
	return s, nil
}

// campaign is a running campaign.
type campaign struct {
	settings
	keep string // folder for the files of failed rounds
	say  func(format string, args ...any)

	dir      string // folder of the images and of the guest
	log      *os.File
	host     *hostProcess
	guest    *guest
	took     *durations
	counts   counts
	failures []string
}

// maxFailures is the number of failures after which a campaign ends, because more show nothing new.
const maxFailures = 10

// run makes the rounds. It returns an error of the test itself only.
func (c *campaign) run(ctx context.Context) (err error) {
	c.took, c.counts = newDurations(), counts{}
	if c.dir, err = os.MkdirTemp("", "directvol-killed-"); err != nil { // a socket's path has at most 107 bytes
		return err
	}
	defer os.RemoveAll(c.dir)
	if c.log, err = os.Create(filepath.Join(c.dir, "host.log")); err != nil {
		return err
	}
	defer c.log.Close()
	defer c.discard()
	for _, r := range c.rounds() {
		if err := c.round(ctx, r); err != nil {
			return fmt.Errorf("round with seed %d: %w", r.seed, err)
		}
		if len(c.failures) >= maxFailures {
			return fmt.Errorf("%d rounds have failed", len(c.failures))
		}
	}
	return c.stop(ctx, "the last round")
}

// rounds returns all rounds. Those that kill the agent come first, because their guest continues.
func (c *campaign) rounds() []*round {
	var agents, others []*round
	for n := range c.count {
		var only target
		if len(c.only) > 0 {
			only = c.only[n%len(c.only)]
		}
		r := newRound(c.seed+uint64(n), only)
		r.took, r.fstypes = c.took, sets[c.set]
		if r.target == agent {
			agents = append(agents, r)
		} else {
			others = append(others, r)
		}
	}
	return append(agents, others...)
}

// round makes a round and counts its result.
func (c *campaign) round(ctx context.Context, r *round) (err error) {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(jobLimit))
	defer cancel()
	began := time.Now()
	if r.dir, err = os.MkdirTemp(c.dir, "images-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.dir)
	failed := c.ready(ctx, r.target == agent)
	if failed == nil {
		c.guest, failed = r.run(ctx, c.guest, c.hosts)
	}
	c.counts.add(r, failed)
	c.say("seed %d: %s killed %d times, during %v (%v); %d blocks, %d growths, %d rescued, stopped in order %v; %.1f s", r.seed, r.target, r.kills, r.cut, r.during, r.blocks(), r.growths(), r.rescued, r.ordered, time.Since(began).Seconds())
	if failed == nil && len(r.left) > 0 {
		failed = fmt.Errorf("left behind: %s", strings.Join(r.left, "; "))
	}
	if failed == nil && r.stops {
		failed = c.stop(ctx, fmt.Sprintf("seed %d", r.seed))
	}
	if failed == nil {
		return nil
	}
	c.failures = append(c.failures, fmt.Sprintf("seed %d: %s killed; in flight: %v: %v\nrun it again: KILLED_FORMATS=%s KILLED_SEED=%d KILLED_TARGET=%s KILLED_COUNT=1 go test -v -run KillOfEachPart ./tests/killed",
		r.seed, r.target, r.cut, failed, c.set, r.seed, r.target))
	c.say("%s", c.failures[len(c.failures)-1])
	err = c.keepRound(r)
	c.discard()
	return err
}

// ready makes sure that a guest of the right kind runs.
func (c *campaign) ready(ctx context.Context, service bool) (err error) {
	if c.guest != nil && c.guest.service == service {
		return nil
	}
	if err := c.stop(ctx, "a guest of the other kind"); err != nil {
		return err
	}
	_ = os.Remove(consoleFile(c.dir))
	h, err := c.hosts()
	if err != nil {
		return err
	}
	began := time.Now()
	c.guest, err = startGuest(ctx, h, c.dir, service)
	c.took.add(start, time.Since(began))
	return err
}

// hosts returns the host's process. It starts another one if that has ended.
func (c *campaign) hosts() (_ *hostProcess, err error) {
	if c.host != nil {
		select {
		case <-c.host.ended:
		default:
			return c.host, nil
		}
	}
	c.host, err = startHost(c.log)
	return c.host, err
}

// stop ends the guest in order, if there is one, and checks that nothing of it remains.
func (c *campaign) stop(ctx context.Context, after string) error {
	if c.guest == nil {
		return nil
	}
	g := c.guest
	if err := g.stop(ctx); err != nil {
		return fmt.Errorf("stop the guest after %s: %w", after, err)
	}
	c.guest = nil
	left, err := leftOnHost(ctx, c.dir, false)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("left behind by the guest that was stopped: %s", strings.Join(left, "; "))
	}
	return err
}

// discard kills all running processes, and removes their files.
func (c *campaign) discard() {
	c.guest = nil
	if c.host != nil {
		c.host.kill()
		c.host = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
	defer cancel()
	if left, err := leftOnHost(ctx, c.dir, true); err != nil || len(left) > 0 {
		c.failures = append(c.failures, fmt.Sprintf("after the host's process: %v left (%v)", left, err))
	}
	running, _ := vm.ProcessesWith(vmDir(c.dir)) // leftOnHost has already reported an error
	for _, p := range running {
		_ = unix.Kill(p.ID, unix.SIGKILL)
	}
	_ = os.RemoveAll(vmDir(c.dir))
}

// keepRound keeps the files of a failed round.
func (c *campaign) keepRound(r *round) error {
	dir := filepath.Join(c.keep, fmt.Sprintf("%d-%s", r.seed, r.target))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	c.say("its images, the guest's console and the host's log are kept in %s", dir)
	for _, path := range []string{consoleFile(c.dir), c.log.Name()} {
		if err := vm.CopySparse(filepath.Join(dir, filepath.Base(path)), path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	for _, v := range r.volumes {
		if err := vm.CopySparse(filepath.Join(dir, v.ID+"."+v.FSType), v.Path); err != nil {
			return err
		}
	}
	return nil
}
