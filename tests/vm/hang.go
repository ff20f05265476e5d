package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/tests/vm/nbd"
)

// storeServer is a process between QEMU and a disk's store: QEMU reads and writes the store through
// it, as through a network. While the process is stopped, the disk hangs.
//
//	drive-ID   raw, the device's node
//	fault-ID   nbd, over a socket ── qemu-storage-daemon ── the file
//	file-ID    the file, not used meanwhile
//
// QEMU locks the file for its own node, so the daemon opens the file without a lock. Only one of
// the two writes at a time, and both write through the host's page cache.
type storeServer struct {
	dir     string
	process *exec.Cmd
	said    *console
	ended   chan struct{}
}

const (
	storeProgram = "qemu-storage-daemon" // in the package qemu-system-common
	storeExport  = "disk"
	// storeLimit is the time limit until the daemon listens, as a base for Limit.
	storeLimit = 5 * time.Second
)

// Hang makes the volume's disk answer nothing from now on, until Answer: requests in flight stay
// there. The first Hang waits for the requests in flight and puts the server below the disk. QEMU
// itself waits for a hanging disk when it is told to detach the disk or to end in order.
func (v *Volume) Hang(ctx context.Context) error {
	if err := v.Serve(ctx); err != nil {
		return err
	}
	return v.server.process.Process.Signal(unix.SIGSTOP)
}

// StopInFlush makes the volume's disk stop inside its next flush, which gets no answer until
// Answer. After that flush nothing is answered if all is set; otherwise everything except flushes
// is answered. inside is closed when that flush has begun. Heal restores the disk.
func (v *Volume) StopInFlush(ctx context.Context, all bool) (inside <-chan struct{}, err error) {
	server, err := nbd.Serve(v.Path, all)
	if err == nil {
		if err = v.insertServer(ctx, server.Socket(), ""); err != nil {
			server.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("stop volume %s in a flush: %w", v.ID, err)
	}
	v.stopped = server
	return server.Inside(), nil
}

// Answer makes a hanging disk continue where it stopped.
func (v *Volume) Answer() error {
	if v.stopped != nil {
		v.stopped.Answer()
		return nil
	}
	return v.server.process.Process.Signal(unix.SIGCONT)
}

// insertServer puts a server of the volume's store below its disk.
func (v *Volume) insertServer(ctx context.Context, socket, export string) error {
	return v.insert(ctx, map[string]any{
		"driver": "nbd", "node-name": v.faultNode(), "export": export, "server": map[string]string{"type": "unix", "path": socket},
	})
}

// Serve puts the server below the disk, if it is not there, so that a later Hang takes no time.
// Heal removes the server.
func (v *Volume) Serve(ctx context.Context) error {
	if v.server != nil {
		return nil
	}
	server, err := serveStore(ctx, v.Path)
	if err == nil {
		if err = v.insertServer(ctx, server.socket(), storeExport); err != nil {
			server.end()
		}
	}
	if err != nil {
		return fmt.Errorf("serve the store of volume %s: %w", v.ID, err)
	}
	v.server = server
	return nil
}

// serveStore starts a server of an image, and returns when it listens.
func serveStore(ctx context.Context, image string) (*storeServer, error) {
	dir, err := os.MkdirTemp("", "directvol-nbd-") // a socket's path has 107 bytes at most
	if err != nil {
		return nil, err
	}
	s := &storeServer{dir: dir, said: &console{}, ended: make(chan struct{})}
	store, err := json.Marshal(map[string]any{"driver": "file", "node-name": storeExport, "filename": image, "locking": "off", "discard": "unmap"})
	if err != nil {
		return nil, err
	}
	s.process = exec.Command(storeProgram, "--blockdev", string(store), "--nbd-server", "addr.type=unix,addr.path="+s.socket(),
		"--export", "type=nbd,id=export,writable=on,node-name="+storeExport+",name="+storeExport)
	s.process.Stdout, s.process.Stderr = s.said, s.said
	if err := s.start(); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	if err := s.listens(ctx); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

func (s *storeServer) start() error {
	s.process.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread's end would send the signal
		defer close(s.ended)
		err := s.process.Start()
		if started <- err; err == nil {
			_ = s.process.Wait() // its output says more
		}
	}()
	err := <-started
	if errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("%w: it is in the package qemu-system-common", err)
	}
	return err
}

func (s *storeServer) socket() string { return filepath.Join(s.dir, "nbd") }

// listens waits until the server listens.
func (s *storeServer) listens(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Limit(storeLimit))
	defer cancel()
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		conn, err := net.Dial("unix", s.socket())
		if err == nil {
			return conn.Close()
		}
		select {
		case <-again.C:
		case <-s.ended:
			return fmt.Errorf("%s has ended: %s", storeProgram, strings.TrimSpace(s.said.tail(consoleLines)))
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen: %w: %w", storeProgram, context.Cause(ctx), err)
		}
	}
}

// end kills the server, whether it is stopped or not.
func (s *storeServer) end() {
	_ = s.process.Process.Kill()
	<-s.ended
	os.RemoveAll(s.dir)
}

// Slow limits the disk to perSecond requests per second, until Heal.
func (v *Volume) Slow(ctx context.Context, perSecond int) error {
	return v.slow(ctx, map[string]int{"iops-total": perSecond})
}

// SlowTo limits the disk to perSecond read and written bytes per second, until Heal.
func (v *Volume) SlowTo(ctx context.Context, perSecond int) error {
	return v.slow(ctx, map[string]int{"bps-total": perSecond})
}

func (v *Volume) slow(ctx context.Context, limits map[string]int) error {
	err := v.guest.VM().QMP().Execute(ctx, "object-add", map[string]any{"qom-type": "throttle-group", "id": v.throttle(), "limits": limits}, nil)
	if err != nil {
		return fmt.Errorf("slow volume %s: %w", v.ID, err)
	}
	v.throttled = true
	return v.insert(ctx, map[string]any{"driver": "throttle", "node-name": v.faultNode(), "throttle-group": v.throttle(), "file": qemu.FileNode(v.DiskID())})
}

func (v *Volume) throttle() string { return "slow-" + v.DiskID() }
