package vm

import (
	"context"
	"fmt"
	"strings"
)

// DeviceOf waits for the disk with a serial, and returns its /dev name. It is for a disk that is
// attached but is not a volume of the agent.
func (g *Guest) DeviceOf(ctx context.Context, serial string) (device string, err error) {
	err = Again(ctx, func() (bool, error) {
		device, err = g.deviceOf(ctx, serial)
		return device != "", err
	})
	if err != nil {
		return "", fmt.Errorf("find the disk %s: %w", serial, err)
	}
	return device, nil
}

func (g *Guest) deviceOf(ctx context.Context, serial string) (string, error) {
	table, err := g.Remote.ReadFile(ctx, "/proc/partitions")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // major, minor, blocks, name
		if len(fields) != 4 || !strings.HasPrefix(fields[3], "vd") {
			continue
		}
		// A disk that is being attached or detached has no serial.
		if text, err := g.Remote.ReadFile(ctx, "/sys/block/"+fields[3]+"/serial"); err == nil && strings.TrimSpace(string(text)) == serial {
			return "/dev/" + fields[3], nil
		}
	}
	return "", nil
}
