package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/tests/vm"
)

const (
	// conditionLimit is the promise: a real fault shows in the condition by
	// then. It is the agent's and holds on any machine.
	conditionLimit = 10 * time.Second

	// staysFor is how long an abnormal condition is then looked at.
	staysFor = 3 * time.Second

	// askInterval is how often it is asked for.
	askInterval = 100 * time.Millisecond

	// breakAfter is what a writer has acknowledged when its disk breaks.
	breakAfter = 8 * miB

	// bystander is what the other volume's writer writes meanwhile.
	bystander = 32 * miB
)

// breakAndHeal is the second half: each volume's disk fails under a writer
// while the other's works, and is mended again.
func breakAndHeal(ctx context.Context, s *transcript, volumes []volume) error {
	ext4, xfs := volumes[0], volumes[1]
	s.section("Both again; the disk below %s fails every write", ext4.FSType)
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
	s.section("The same below %s", xfs.FSType)
	if err := xfs.failUnderWriter(ctx, s, ext4); err != nil {
		return err
	}
	if err := xfs.step(ctx, s, "heal the disk, unmount, mount: healthy at once", (volume).remount, (volume).healthy); err != nil {
		return err
	}
	s.section("Nothing is missing")
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

// part is what a step does with its volume.
type part func(v volume, ctx context.Context, say func(string)) error

// step runs parts that need no more than the volume, one after the other.
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

// failUnderWriter breaks the disk under a writer, and holds the condition to
// its promise while the other volume stays healthy under a writer of its own.
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
		if err := v.staysAbnormal(ctx, say, other); err != nil {
			return err
		}
		if err := writer.Stop(ctx); err == nil {
			return errors.New("the writer has met no error: the fault was none")
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

// staysAbnormal asks both volumes for a while: this one is to stay abnormal, the
// other healthy. ext4's journal meets the fault only with its next commit, some
// seconds later: that is waited for.
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

// remembers holds ext4 to what it does after a fault: it works, says that its
// superblock records errors, and is not grown.
func (v volume) remembers(ctx context.Context, s *transcript) error {
	works := func(v volume, ctx context.Context, _ func(string)) error { return v.Touch(ctx) }
	if err := v.step(ctx, s, "heal the disk, unmount, mount: it works, and says that it remembers", (volume).remount, works, func(v volume, ctx context.Context, say func(string)) error {
		stats, err := v.LookedStats(ctx)
		if err != nil {
			return err
		}
		say(stats.VolumeCondition.Message)
		if !vm.RecordsErrors(stats.VolumeCondition) {
			return fmt.Errorf("its condition does not say that the superblock records errors: %q", stats.VolumeCondition.Message)
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

// repair runs e2fsck on the detached disk, and mounts it again.
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
