package vm

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// askAgain is how often the guest's kernel is asked for what it tells no test.
const askAgain = 10 * time.Millisecond

// DeviceOf waits for the disk with a serial, and returns its /dev name: for one that is
// attached and no volume of the agent's.
func (g *Guest) DeviceOf(ctx context.Context, serial string) (string, error) {
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		device, err := g.deviceOf(ctx, serial)
		if err != nil || device != "" {
			return device, err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return "", fmt.Errorf("find the disk %s: %w", serial, context.Cause(ctx))
		}
	}
}

func (g *Guest) deviceOf(ctx context.Context, serial string) (string, error) {
	table, err := g.Act.ReadFile(ctx, "/proc/partitions")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // major, minor, blocks, name
		if len(fields) != 4 || !strings.HasPrefix(fields[3], "vd") {
			continue
		}
		// A disk that is on its way, or out, has none.
		if text, err := g.Act.ReadFile(ctx, "/sys/block/"+fields[3]+"/serial"); err == nil && strings.TrimSpace(string(text)) == serial {
			return "/dev/" + fields[3], nil
		}
	}
	return "", nil
}
