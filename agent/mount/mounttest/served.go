package mounttest

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Server is the server of a FUSE (fuse(4)): a directory with one entry, which is a file with a
// disk's image or a directory to mount on. It answers all requests until a method holds some.
type Server struct {
	file *os.File // nil if the entry is a directory
	size uint64
	fd   int
	mu   sync.Mutex
	gate map[uint32]<-chan struct{} // by request: each answer receives from its channel first
	over chan struct{}
}

// Requests of the FUSE protocol that a Server knows (enum fuse_opcode in
// include/uapi/linux/fuse.h).
const (
	fuseLookup, fuseForget, fuseGetattr, fuseSetattr, fuseOpen = 1, 2, 3, 4, 14
	fuseRead, fuseWrite, fuseRelease, fuseFsync, fuseFlush     = 15, 16, 18, 20, 25
	fuseInit, fuseOpendir, fuseReleasedir                      = 26, 27, 29
	fuseInterrupt, fuseBatchForget                             = 36, 42
)

// fuseRequest is larger than the largest request that a Server receives.
const fuseRequest = 1 << 18

// ServeDisk mounts a FUSE with one file, which holds an image, for Attach.
func ServeDisk(t *testing.T, image string) (file string, s *Server) {
	t.Helper()
	backing, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { backing.Close() })
	info, err := backing.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, &Server{file: backing, size: uint64(info.Size())})
}

// ServeFolder mounts a FUSE with one directory. The kernel asks the server each time a path leads
// through that directory.
func ServeFolder(t *testing.T) (folder string, s *Server) {
	t.Helper()
	return serve(t, &Server{})
}

func serve(t *testing.T, s *Server) (entry string, server *Server) {
	t.Helper()
	mayHang(t)
	dir := Dir(t)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Mount("served", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd))
	}
	if err != nil {
		t.Skipf("it mounts a FUSE: %v: run it as root where /dev/fuse is", err)
	}
	s.fd, s.gate, s.over = fd, map[uint32]<-chan struct{}{}, make(chan struct{})
	go s.run()
	t.Cleanup(func() {
		close(s.over)
		_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH) // ends pending requests, and then run
	})
	return filepath.Join(dir, "entry"), s
}

// HoldFlushes delays the answers to fsync until release is called.
func (s *Server) HoldFlushes() (release func()) { return s.hold(fuseFsync) }

// HoldLookups delays the answers to all lookups of the entry until release is called.
func (s *Server) HoldLookups() (release func()) { return s.hold(fuseLookup, fuseGetattr) }

// GateWrites makes the server answer one write for each value that gate delivers, and all writes
// after gate is closed.
func (s *Server) GateWrites(gate <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gate[fuseWrite] = gate
}

func (s *Server) hold(requests ...uint32) (release func()) {
	held := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, request := range requests {
		s.gate[request] = held
	}
	return sync.OnceFunc(func() { close(held) })
}

// run answers requests until the mount is gone, and then closes the server's file descriptor.
func (s *Server) run() {
	defer unix.Close(s.fd)
	buf := make([]byte, fuseRequest)
	for {
		n, err := unix.Read(s.fd, buf)
		if err == unix.EINTR || err == unix.ENOENT { // interrupted before it was read
			continue
		}
		if err != nil || n < 40 {
			return
		}
		request := append([]byte(nil), buf[:n]...)
		s.mu.Lock()
		gate := s.gate[binary.LittleEndian.Uint32(request[4:])]
		s.mu.Unlock()
		if gate == nil {
			s.answer(request)
			continue
		}
		go func() {
			select {
			case <-gate:
				s.answer(request)
			case <-s.over:
			}
		}()
	}
}

// answer answers a request: length, opcode, unique, node, 16 more bytes, and the arguments.
func (s *Server) answer(request []byte) {
	le := binary.LittleEndian
	body, errno := s.body(le.Uint32(request[4:]), le.Uint64(request[16:]), request[40:])
	if body == nil && errno == 0 {
		return // no answer is wanted
	}
	out := make([]byte, 16, 16+len(body))
	le.PutUint32(out, uint32(16+len(body)))
	le.PutUint32(out[4:], uint32(-int32(errno)))
	copy(out[8:], request[8:16])
	_, _ = unix.Write(s.fd, append(out, body...)) // fails if nobody waits any more
}

func (s *Server) body(opcode uint32, node uint64, in []byte) (body []byte, errno unix.Errno) {
	le := binary.LittleEndian
	switch opcode {
	case fuseInit:
		body = make([]byte, 64)
		le.PutUint32(body, 7) // the protocol's version
		le.PutUint32(body[4:], 31)
		le.PutUint32(body[20:], fuseRequest/2) // the largest write
	case fuseLookup:
		body = append(make([]byte, 40), s.attributes(2)...)
		le.PutUint64(body, 2) // the entry's node, which the kernel must not cache
	case fuseGetattr, fuseSetattr:
		body = append(make([]byte, 16), s.attributes(node)...)
	case fuseOpen, fuseOpendir:
		body = make([]byte, 16)
	case fuseRead:
		body = make([]byte, le.Uint32(in[16:]))
		n, _ := s.file.ReadAt(body, int64(le.Uint64(in[8:])))
		body = body[:n]
	case fuseWrite:
		size := le.Uint32(in[16:])
		if _, err := s.file.WriteAt(in[40:40+size], int64(le.Uint64(in[8:]))); err != nil {
			return nil, unix.EIO
		}
		body = make([]byte, 8)
		le.PutUint32(body, size)
	case fuseFsync, fuseFlush, fuseRelease, fuseReleasedir:
		body = []byte{}
	case fuseForget, fuseBatchForget, fuseInterrupt:
	default:
		errno = unix.ENOSYS
	}
	return body, errno
}

// attributes returns struct fuse_attr of the root, which is node 1, or of the entry.
func (s *Server) attributes(node uint64) []byte {
	le := binary.LittleEndian
	b := make([]byte, 88)
	mode := uint32(unix.S_IFDIR | 0o755)
	if node != 1 && s.file != nil {
		mode = unix.S_IFREG | 0o600
		le.PutUint64(b[8:], s.size)
	}
	le.PutUint64(b, node)
	le.PutUint32(b[60:], mode)
	le.PutUint32(b[64:], 1)
	le.PutUint32(b[80:], 4096)
	return b
}
