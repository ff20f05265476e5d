package kernel

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/directvol/directvol/protocols/output"
)

const (
	maxEntries  = 1 << 17 // entries in a package
	maxUnpacked = 4 << 30 // bytes of all files unpacked from a package
)

// wanted matches the files of a kernel package that are unpacked.
var wanted = regexp.MustCompile(`^(boot/vmlinuz-[^/]+|(usr/)?lib/modules/[^/]+/(vmlinuz|modules\.builtin(\.modinfo)?|kernel/.+\.ko(\.xz|\.zst)?))$`)

// unpackOnce returns the directory with the files of all debs. The first call for the same bytes
// unpacks them below the cache.
func unpackOnce(ctx context.Context, debs []string, cache string, progress *output.Progress) (string, error) {
	sum, err := jointSum(debs)
	if err != nil {
		return "", err
	}
	// The name also depends on the set of wanted files, so that another version of this program
	// does not use a directory that lacks files.
	dir := filepath.Join(cache, fmt.Sprintf("kernel-%s-%08x", sum, crc32.ChecksumIEEE([]byte(wanted.String()))))
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return dir, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	temp, err := os.MkdirTemp(cache, "unpack-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	err = watch(ctx, progress, "unpack the kernel package", temp, func(ctx context.Context) error {
		for _, deb := range debs {
			err := unpackDeb(ctx, deb, temp)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return fmt.Errorf("unpack kernel package %s: %w", deb, err)
			}
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return "", err
	}
	if err := os.Rename(temp, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another process may have been faster
		return "", err
	}
	return dir, nil
}

// unpackDeb runs dpkg-deb to decompress the package, and unpacks its tar stream into dir.
func unpackDeb(ctx context.Context, deb, dir string) error {
	tool, err := exec.LookPath("dpkg-deb")
	if err != nil {
		return errors.New("dpkg-deb is not installed: install dpkg, or unpack the package elsewhere and name the folder (--kernel-dir)")
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel() // ends dpkg-deb if its output is refused
	cmd := command(running, dir, tool, "--fsys-tarfile", deb)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	unpackErr := unpackTar(out, dir)
	refused := unpackErr != nil && running.Err() == nil && !errors.Is(unpackErr, io.ErrUnexpectedEOF)
	if unpackErr != nil {
		cancel()
		out.Close()
	}
	waitErr := cmd.Wait()
	complaint := lastLine(stderr.Bytes())
	switch {
	case refused:
		return unpackErr // dpkg-deb was ended because of this error
	case complaint != "" && waitErr != nil: // also the cause of unpackErr, if any
		return fmt.Errorf("%s: %w", complaint, waitErr)
	}
	return errors.Join(unpackErr, waitErr)
}

// unpackTar writes the wanted files of a tar stream into dir, and nothing outside of dir. It skips
// other entries. It refuses a name that leads out of the archive's root, even for an unwanted
// entry. It never makes links or special files.
func unpackTar(r io.Reader, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	archive := tar.NewReader(r)
	total := int64(0)
	for range maxEntries {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, r) // reads the padding, so that the writer can finish
			return err
		}
		if err != nil {
			return fmt.Errorf("read tar stream: %w", err)
		}
		name := path.Clean(strings.TrimPrefix(header.Name, "./"))
		if !filepath.IsLocal(name) {
			return fmt.Errorf("tar entry %.100q leads out of the package: refused", header.Name)
		}
		if header.Typeflag != tar.TypeReg || !wanted.MatchString(name) {
			continue
		}
		if total += header.Size; header.Size > maxModule || total > maxUnpacked {
			return fmt.Errorf("tar entry %.100q has %d bytes: too large for a kernel package", name, header.Size)
		}
		if err := unpackFile(root, name, archive); err != nil {
			return fmt.Errorf("unpack %.100q: %w", name, err)
		}
	}
	return fmt.Errorf("tar stream has more than %d entries: not a kernel package", maxEntries)
}

func unpackFile(root *os.Root, name string, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// jointSum returns a name for a set of files that depends on their bytes but not on their order:
// the SHA-256 of a single file, or the SHA-256 of several files' SHA-256s.
func jointSum(files []string) (string, error) {
	var sums []string
	for _, file := range files {
		sum, err := fileSum(file)
		if err != nil {
			return "", err
		}
		sums = append(sums, sum)
	}
	if len(sums) == 1 {
		return sums[0], nil
	}
	slices.Sort(sums)
	joint := sha256.Sum256([]byte(strings.Join(sums, "\n")))
	return hex.EncodeToString(joint[:]), nil
}

// fileSum returns the SHA-256 of a file in hexadecimal.
func fileSum(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", fmt.Errorf("read %s: %w", file, err)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// lastLine returns the last line of a program's messages, which usually says why it failed.
func lastLine(output []byte) string {
	output = bytes.TrimSpace(output)
	return string(output[bytes.LastIndexByte(output, '\n')+1:])
}
