package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

const (
	// conditionLimit is the time within which the agent promises to report a real fault as a
	// condition. The limit holds on any machine.
	conditionLimit = 10 * time.Second

	// staysFor is how long the demo then watches an abnormal condition.
	staysFor = 3 * time.Second

	// askInterval is the pause between two requests for the condition.
	askInterval = 100 * time.Millisecond

	// breakAfter is the number of bytes that a writer has acknowledged before the demo breaks its
	// disk.
	breakAfter = 8 * miB

	// bystander is the number of bytes that the other volume's writer writes meanwhile.
	bystander = 32 * miB
)

// breakAndHeal is the second half of the demo: each volume's disk fails under a writer and is
// repaired, while the other volume's disk works.
func breakAndHeal(ctx context.Context, s *transcript, volumes []volume) error {
	ext4, xfs := volumes[0], volumes[1]
	s.section("Both again; the disk of %s fails every write", ext4.FSType)
	for _, v := range volumes {
		if err := v.mount(ctx, s); err != nil {
			return err
		}
	}
	if err := ext4.failUnderWriter(ctx, s, xfs); err != nil {
		return err
	}
	if err := ext4.remembers(ctx, s); err != nil {
		return err
	}
	if err := ext4.repair(ctx, s); err != nil {
		return err
	}
	s.section("The same with %s", xfs.FSType)
	if err := xfs.failUnderWriter(ctx, s, ext4); err != nil {
		return err
	}
	if err := xfs.step(ctx, s, "repair the disk, remount: healthy at once", (volume).remount, (volume).healthy); err != nil {
		return err
	}
	s.section("No data is missing")
	for _, v := range volumes {
		if err := v.readBack(ctx, s); err != nil {
			return err
		}
		if err := v.detach(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// part is one part of a step, which works on the volume.
type part func(v volume, ctx context.Context, say func(string)) error

// step runs parts that need only the volume, one after the other.
func (v volume) step(ctx context.Context, s *transcript, name string, parts ...part) error {
	return s.step(ctx, v.FSType+": "+name, func(ctx context.Context, say func(string)) error {
		for _, part := range parts {
			if err := part(v, ctx, say); err != nil {
				return err
			}
		}
		return nil
	})
}

// failUnderWriter breaks the disk under a writer. It checks that the condition appears within
// conditionLimit, and that the other volume, which has its own writer, stays healthy.
func (v volume) failUnderWriter(ctx context.Context, s *transcript, other volume) error {
	writer, err := v.StartWriter(ctx, 0)
	if err != nil {
		return err
	}
	beside, err := other.StartWriter(ctx, bystander)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("break the disk under the writer: abnormal within %v, %s healthy", conditionLimit, other.FSType)
	return v.step(ctx, s, name, func(v volume, ctx context.Context, say func(string)) error {
		if err := writer.Await(ctx, breakAfter); err != nil {
			return err
		}
		if err := v.BreakWrites(ctx); err != nil {
			return err
		}
		broken := time.Now()
		message, err := v.awaitAbnormal(ctx)
		if err != nil {
			return err
		}
		v.report.SecondsToAbnormal = time.Since(broken).Seconds()
		say(message)
		v.report.ConditionsFault = []Condition{{true, message}}
		if err := s.watch.await(ctx, v, func(now *volumepb.Volume) bool { return len(now.Conditions) > 0 }); err != nil {
			return err
		}
		if err := v.staysAbnormal(ctx, say, other); err != nil {
			return err
		}
		if err := writer.Stop(ctx); err == nil {
			return errors.New("the writer has met no error: the fault had no effect")
		}
		if err := beside.Stop(ctx); err != nil {
			return fmt.Errorf("the writer of %s: %w", other.FSType, err)
		}
		return nil
	})
}

func (v volume) awaitAbnormal(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, conditionLimit)
	defer cancel()
	return v.AwaitCondition(ctx, vm.Abnormal)
}

// staysAbnormal checks both volumes for a while: this one must stay abnormal, the other one
// healthy. The journal of ext4 meets the fault only at its next commit, some seconds later, so
// staysAbnormal waits for that commit.
func (v volume) staysAbnormal(ctx context.Context, say func(string), other volume) error {
	again := time.NewTicker(askInterval)
	defer again.Stop()
	enough := vm.Abnormal
	if v.FSType == "ext4" {
		enough = vm.RecordsErrors
	}
	for since := time.Now(); ; {
		stats, err := v.LookedStats(ctx)
		if err != nil {
			return err
		}
		if vm.Healthy(stats.VolumeCondition) {
			return errors.New("its condition turned healthy while the fault was there")
		}
		say(stats.VolumeCondition.Message)
		v.report.ConditionsFault = conditions(stats)
		if err := other.healthy(ctx, say); err != nil {
			return err
		}
		if time.Since(since) > staysFor && enough(stats.VolumeCondition) {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("its condition is still %q: %w", stats.VolumeCondition.Message, ctx.Err())
		}
	}
}

func (v volume) remount(ctx context.Context, _ func(string)) error {
	if err := v.Heal(ctx); err != nil {
		return err
	}
	if err := v.Unmount(ctx); err != nil {
		return err
	}
	return v.Mount(ctx)
}

func (v volume) healthy(ctx context.Context, _ func(string)) error {
	stats, err := v.LookedStats(ctx)
	if err != nil {
		return err
	}
	v.report.ConditionsAfter = conditions(stats)
	if len(v.report.ConditionsAfter) > 0 {
		return fmt.Errorf("%s is not healthy: %s", v.FSType, stats.VolumeCondition.Message)
	}
	return nil
}

// remembers checks the behaviour of ext4 after a fault: it works, reports that its superblock
// records errors, and refuses to grow.
func (v volume) remembers(ctx context.Context, s *transcript) error {
	works := func(v volume, ctx context.Context, _ func(string)) error { return v.Touch(ctx) }
	if err := v.step(ctx, s, "repair the disk, remount: ext4 works and still reports its recorded errors", (volume).remount, works, func(v volume, ctx context.Context, say func(string)) error {
		stats, err := v.LookedStats(ctx)
		if err != nil {
			return err
		}
		say(stats.VolumeCondition.Message)
		if !vm.RecordsErrors(stats.VolumeCondition) {
			return fmt.Errorf("its condition does not mention the superblock's recorded errors: %q", stats.VolumeCondition.Message)
		}
		return nil
	}); err != nil {
		return err
	}
	return v.step(ctx, s, "ask it to grow: refused until e2fsck has run", func(v volume, ctx context.Context, say func(string)) error {
		err := v.Resize(ctx, v.report.DeviceBytesAfter+64*miB)
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "e2fsck") {
			return fmt.Errorf("want FAILED_PRECONDITION that names e2fsck, got: %w", err)
		}
		say("FailedPrecondition")
		return nil
	})
}

// repair runs e2fsck on the detached disk, and mounts the volume again.
func (v volume) repair(ctx context.Context, s *transcript) error {
	return v.step(ctx, s, "detach, e2fsck -p, attach, mount: healthy", func(v volume, ctx context.Context, _ func(string)) error {
		if err := v.Detach(ctx); err != nil {
			return err
		}
		if _, err := vm.Repair(ctx, v.Path); err != nil {
			return err
		}
		return v.Mount(ctx)
	}, (volume).healthy)
}
