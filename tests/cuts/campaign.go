package cuts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/tests/vm"
)

const (
	volumesACut = 4
	// replaysAKill is the number of replays of the records of one kill, each cut at another point.
	replaysAKill = 4
	// maxKept is the maximum number of images of failures that are kept of each filesystem.
	maxKept = 8

	// volumeLimit is the time limit for the start or the check of one volume, as a base for
	// vm.Limit.
	volumeLimit = 10 * time.Second

	// tellWarnings makes the guest's kernel print its warnings on the console.
	tellWarnings = "loglevel=5"
)

// settings are the parameters of a campaign.
type settings struct {
	way   string
	set   string // of formats
	newer bool   // use the newer kernel
	seed  uint64
	cuts  int
}

// fromEnvironment reads the settings of a manual run.
func fromEnvironment(cuts int, set string) (s settings, err error) {
	s.way = cmp.Or(os.Getenv("CUTS_WAY"), "agent")
	if _, ok := ways[s.way]; !ok {
		return s, fmt.Errorf("CUTS_WAY=%q: want agent, bare, freeze, remount or freeze+remount", s.way)
	}
	s.set = cmp.Or(os.Getenv("CUTS_FORMATS"), set)
	if _, ok := formats[s.set]; !ok {
		return s, fmt.Errorf("CUTS_FORMATS=%q: want usual, others or mapped", s.set)
	}
	switch kernel := cmp.Or(os.Getenv("CUTS_KERNEL"), "ordinary"); kernel {
	case "ordinary":
	case "newer":
		s.newer = true
	default:
		return s, fmt.Errorf("CUTS_KERNEL=%q: want ordinary or newer", kernel)
	}
	if s.seed, err = strconv.ParseUint(cmp.Or(os.Getenv("CUTS_SEED"), strconv.FormatUint(rand.Uint64(), 10)), 10, 64); err != nil {
		return s, fmt.Errorf("CUTS_SEED: want a number: %w", err)
	}
	if s.set == mapped && (s.way != "agent" || s.newer) {
		return s, errMappedWay
	}
	s.cuts, err = strconv.Atoi(cmp.Or(os.Getenv("CUTS_COUNT"), strconv.Itoa(cuts)))
	if err != nil || s.cuts < 1 {
		return s, fmt.Errorf("CUTS_COUNT=%q: want a number from 1 on", os.Getenv("CUTS_COUNT"))
	}
	return s, nil
}

// campaign is a running campaign.
type campaign struct {
	settings
	dir    string // folder for images
	keep   string // folder for images of failures
	image  string // of the guest; "" for the usual one
	say    func(format string, args ...any)
	random *rand.Rand

	guest    *vm.Guest
	kernel   string // the release of the guest's kernel
	cut      int
	volumes  int
	disks    int // the number of checked disks
	counts   counts
	failures []string       // failures of the campaign
	kept     map[string]int // number of kept images, by filesystem
	met      []*remains     // volumes for rescue
}

// run makes the cuts. It returns an error of the test itself only.
func (c *campaign) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, c.end()) }()
	if err := c.begin(ctx); err != nil {
		return err
	}
	for c.cut < c.cuts {
		if err := c.round(ctx); err != nil {
			return fmt.Errorf("cut %d: %w", c.cut, err)
		}
	}
	return nil
}

// begin boots the first guest.
func (c *campaign) begin(ctx context.Context) error {
	c.counts, c.kept = counts{}, map[string]int{}
	c.random = rand.New(rand.NewPCG(c.seed, 0))
	return c.boot(ctx)
}

// end ends the last guest.
func (c *campaign) end() error {
	if c.guest == nil {
		return nil
	}
	c.guest.Kill()
	return c.guest.Close()
}

// report returns the results as Markdown.
func (c *campaign) report() string {
	return fmt.Sprintf("%d cuts of %d, formats %s, way %s, seed %d.\n\n%s", c.cut, c.cuts, c.set, c.way, c.seed, c.counts.table())
}

// boot boots the guest that checks the volumes, and that is killed next.
func (c *campaign) boot(ctx context.Context) (err error) {
	if c.guest != nil {
		if err := c.guest.Close(); err != nil {
			return err
		}
	}
	if c.guest, err = vm.Boot(ctx, vm.Options{Newer: c.newer, Image: c.image, Append: tellWarnings}); err != nil {
		return err
	}
	release, err := c.guest.Remote.ReadFile(ctx, "/proc/sys/kernel/osrelease")
	c.kernel = strings.TrimSpace(string(release))
	return err
}

// round kills one guest, and replays its records cut at other points.
func (c *campaign) round(ctx context.Context) error {
	var volumes []*volume
	defer func() {
		for _, v := range volumes {
			v.remove()
		}
	}()
	for range volumesACut {
		kinds := formats[c.set]
		v, err := newVolume(ctx, c.dir, c.volumes, kinds[c.volumes%len(kinds)], c.random)
		if err != nil {
			return err
		}
		volumes = append(volumes, v)
		c.volumes++
		if err := limited(ctx, func(ctx context.Context) error { return v.begin(ctx, c.guest, ways[c.way]) }); err != nil {
			return fmt.Errorf("volume %s (%s %v): %w", v.id, v.fstype, v.options, err)
		}
	}
	began := time.Now()
	failed := killWhileGrowing(ctx, c.guest, volumes, c.random)
	if err := c.boot(ctx); err != nil {
		return err
	}
	c.cut++
	c.say("cut %d: the kill and the next boot took %.1f s", c.cut, time.Since(began).Seconds())
	var left []*remains
	for _, v := range volumes {
		r, err := v.killed()
		if err != nil {
			return err
		}
		if err := failed[v]; err != nil {
			c.lose(r, finding{duringUse, err})
		}
		left = append(left, r)
	}
	if err := c.checkCut(ctx, left); err != nil {
		return err
	}
	if err := c.replays(ctx, volumes); err != nil {
		return err
	}
	return c.rescue(ctx)
}

// replays cuts the records of one round.
func (c *campaign) replays(ctx context.Context, volumes []*volume) error {
	var records []*replays
	defer func() {
		for _, r := range records {
			r.file.Close()
		}
	}()
	for _, v := range volumes {
		r, err := v.replays()
		if errors.Is(err, errNoRecord) {
			continue
		}
		if err != nil {
			return err
		}
		records = append(records, r)
	}
	for n := range replaysAKill {
		if c.cut == c.cuts || len(records) == 0 {
			return nil
		}
		c.cut++
		var left []*remains
		for _, record := range records {
			r, err := record.cutAt(record.choose(c.random, n%2 == 0), filepath.Join(c.dir, fmt.Sprintf("%s-%d.img", record.id, n)))
			if err != nil {
				return fmt.Errorf("volume %s: %w", record.id, err)
			}
			left = append(left, r)
		}
		if err := c.checkCut(ctx, left); err != nil {
			return err
		}
	}
	return nil
}

// checkCut checks and counts all volumes of one cut.
func (c *campaign) checkCut(ctx context.Context, left []*remains) error {
	began := time.Now()
	seen := map[row]bool{}
	var said []string
	for _, r := range left {
		n := c.counts.of(c.row(r))
		if !seen[c.row(r)] {
			seen[c.row(r)] = true
			n.cuts++
		}
		n.volume(r)
		found, err := c.check(ctx, r)
		if err != nil {
			return fmt.Errorf("volume %s (%s %v): %w", r.id, r.fstype, r.options, err)
		}
		text := fmt.Sprintf("%s %d blocks, %d growths", r.fstype, r.ledger.Blocks(), r.growths)
		if r.window {
			text += ", in the window"
		}
		for _, f := range found {
			text += ", " + strings.ToUpper(string(f.loss))
		}
		said = append(said, text)
	}
	c.say("cut %d of %d, a %s, checked in %.1f s: %s", c.cut, c.cuts, left[0].kind, time.Since(began).Seconds(), strings.Join(said, "; "))
	return nil
}

func (c *campaign) row(r *remains) row { return row{r.fstype, c.kernel, r.kind} }

// check checks one volume. If something is lost, it keeps the image as it was before the check. It
// leaves a volume that met the window to rescue.
func (c *campaign) check(ctx context.Context, r *remains) (found []finding, err error) {
	if _, err := os.Stat(r.untouched()); err != nil { // a rescued volume already has the copy
		if err := vm.CopySparse(r.untouched(), r.path); err != nil {
			return nil, err
		}
	}
	c.disks++
	err = limited(ctx, func(ctx context.Context) error {
		found, err = r.check(ctx, c.guest, ways[c.way], fmt.Sprintf("c%d", c.disks))
		if ctx.Err() == nil {
			return err
		}
		found = []finding{{hung, errors.Join(err, c.explanation())}}
		c.guest.Kill()
		return nil
	})
	if len(found) == 1 && found[0].loss == hung {
		err = c.boot(ctx)
	}
	for _, f := range found {
		c.lose(r, f)
	}
	switch {
	case err == nil && len(found) == 0:
		return nil, r.removeImages()
	case err == nil && found[0].loss == metWindow:
		c.met = append(c.met, r)
		return found, nil
	}
	return found, errors.Join(err, c.keepUntouched(r), r.removeImages())
}

// keepUntouched keeps an image as the cut left it.
func (c *campaign) keepUntouched(r *remains) error {
	if c.kept[r.fstype] == maxKept {
		return nil
	}
	c.kept[r.fstype]++
	image := filepath.Join(c.keep, fmt.Sprintf("%s-cut%d-%s.img", r.fstype, c.cut, r.id))
	c.say("it is kept as the cut left it: CUTS_WAY=%s CUTS_IMAGE=%s go test -v -run Kept ./tests/cuts", c.way, image)
	return errors.Join(os.MkdirAll(c.keep, 0o755), vm.CopySparse(image, r.untouched()))
}

// explanation returns an error with the guest's console.
func (c *campaign) explanation() error {
	var text strings.Builder
	c.guest.Explain(&text)
	return errors.New(text.String())
}

// lose counts a loss.
func (c *campaign) lose(r *remains, f finding) {
	c.counts.of(c.row(r)).lost[f.loss]++
	text := fmt.Sprintf("cut %d, volume %s (%s %v; %s; %d blocks, %d growths): %s: %v", c.cut, r.id, r.fstype, r.options, r.how, r.ledger.Blocks(), r.growths, f.loss, f.err)
	c.say("%s", text) // at once, as a campaign takes hours
	if c.way == "agent" && f.loss != metWindow {
		c.failures = append(c.failures, text)
	}
}

// rescue runs `directvol rescue` on the volumes of a round that met the window, as a user would,
// and checks them afterwards.
func (c *campaign) rescue(ctx context.Context) error {
	met := c.met
	c.met = nil
	defer func() {
		for _, r := range met {
			_ = r.removeImages()
		}
	}()
	if len(met) == 0 {
		return nil
	}
	whole, err := c.rescueAll(ctx, met)
	if err != nil {
		return err
	}
	for _, r := range whole {
		found, err := c.check(ctx, r)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			c.counts.of(c.row(r)).rescued++
		}
	}
	return nil
}

// rescueAll runs `directvol rescue` on volumes, and returns the rescued ones. No guest runs beside
// it; afterwards there is a new one.
func (c *campaign) rescueAll(ctx context.Context, met []*remains) (whole []*remains, err error) {
	build, err := vm.FindBuild()
	if err != nil {
		return nil, err
	}
	kernel, image, err := build.Rescue()
	if err != nil {
		return nil, fmt.Errorf("%d volumes met the window and cannot be rescued: %w", len(met), err)
	}
	if err := limited(ctx, c.guest.Stop); err != nil { // only one VM at a time
		return nil, err
	}
	for _, r := range met {
		report, err := r.rescue(ctx, rescue.Config{Disk: r.path, Kernel: kernel, Image: image, Directvol: build.Directvol, Timeout: vm.Limit(volumeLimit)})
		if err == nil {
			r.window, r.growths = false, 0 // from now on, a refusal is a failure
			whole = append(whole, r)
			c.say("volume %s (%s): rescued by Linux %s", r.id, r.fstype, report.Kernel)
			continue
		}
		if ctx.Err() != nil {
			return nil, err
		}
		c.lose(r, finding{refused, err})
		if err := c.keepUntouched(r); err != nil {
			return nil, err
		}
	}
	return whole, c.boot(ctx)
}

func limited(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(volumeLimit))
	defer cancel()
	return do(ctx)
}
