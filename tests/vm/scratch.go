package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// makers format an image with the programs that users have, and their defaults.
var makers = map[string][]string{
	"ext4": {"mkfs.ext4", "-q", "-F"},
	"xfs":  {"mkfs.xfs", "-q", "-f"},
}

// Scratch makes a sparse image of so many bytes below dir and formats it.
// mkfs.xfs wants 300 MiB or more.
func Scratch(ctx context.Context, dir, fstype string, bytes int64) (string, error) {
	maker, ok := makers[fstype]
	if !ok {
		return "", fmt.Errorf("no mkfs is known for %s", fstype)
	}
	file, err := os.CreateTemp(dir, fstype+"-*.img")
	if err != nil {
		return "", err
	}
	defer file.Close()
	if err := file.Truncate(bytes); err != nil {
		return "", err
	}
	path, err := filepath.Abs(file.Name())
	if err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, maker[0], append(maker[1:len(maker):len(maker)], path)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", maker[0], err, out)
	}
	return path, nil
}
