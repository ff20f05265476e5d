// Package nbd serves an image as a network block device to one client, and stops inside a flush if
// a test wants that. It implements the part of the newstyle protocol that QEMU needs; doc/proto.md
// of github.com/NetworkBlockDevice/nbd has the numbers.
package nbd

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
)

// Server serves one image until Close.
type Server struct {
	dir      string
	listener net.Listener
	store    *os.File
	bytes    uint64
	served   sync.WaitGroup
	all      bool
	inside   chan struct{}
	come     func() // closes inside
	goOn     chan struct{}
	answer   func() // closes goOn

	mu   sync.Mutex // guards the fields below, and writing to the client
	conn net.Conn   // nil before a client has connected
	err  error      // error of the image
}

// Serve serves an image. Its first flush gets no answer until Answer. After that flush nothing is
// answered if all is set; otherwise everything except flushes is answered. The caller closes the
// Server.
func Serve(image string, all bool) (*Server, error) {
	s := &Server{all: all, inside: make(chan struct{}), goOn: make(chan struct{})}
	s.come = sync.OnceFunc(func() { close(s.inside) })
	s.answer = sync.OnceFunc(func() { close(s.goOn) })
	var err error
	if s.store, err = os.OpenFile(image, os.O_RDWR, 0); err != nil {
		return nil, err
	}
	info, err := s.store.Stat()
	if err == nil {
		s.bytes = uint64(info.Size())
		s.dir, err = os.MkdirTemp("", "directvol-nbd-") // a socket's path has at most 107 bytes
	}
	if err == nil {
		s.listener, err = net.Listen("unix", s.Socket())
	}
	if err != nil {
		s.store.Close()
		os.RemoveAll(s.dir)
		return nil, err
	}
	s.served.Go(s.serve)
	return s, nil
}

// Socket returns the path of the server's socket. The name of the export is "".
func (s *Server) Socket() string { return filepath.Join(s.dir, "socket") }

// Inside returns a channel that is closed when the first flush has come.
func (s *Server) Inside() <-chan struct{} { return s.inside }

// Answer makes the server answer that flush and everything from now on.
func (s *Server) Answer() { s.answer() }

// Close ends the server, and returns an error if the image has failed.
func (s *Server) Close() error {
	s.answer()
	s.listener.Close()
	s.mu.Lock()
	if s.conn != nil {
		s.conn.Close()
	}
	s.mu.Unlock()
	s.served.Wait()
	os.RemoveAll(s.dir)
	return errors.Join(s.err, s.store.Close())
}

func (s *Server) serve() {
	conn, err := s.listener.Accept()
	if err != nil {
		return
	}
	defer conn.Close()
	s.mu.Lock()
	s.conn = conn
	s.mu.Unlock()
	client := bufio.NewReader(conn)
	if s.negotiate(conn, client) != nil {
		return
	}
	for s.request(client) == nil {
	}
}

// The numbers of the protocol.
const (
	magic, optionMagic, optionReply = 0x4e42444d41474943, 0x49484156454f5054, 0x3e889045565a9 // "NBDMAGIC", "IHAVEOPT"
	requestMagic, replyMagic        = 0x25609513, 0x67446698

	fixedNewstyle, noZeroes = 1, 2
	optionGo                = 7
	ack, info, unsupported  = 1, 3, 1<<31 | 1
	infoExport, infoBytes   = 0, 12
	hasFlags, takesFlushes  = 1, 4

	opRead, opWrite, opEnd, opFlush = 0, 1, 2, 3
	errIO, errInvalid               = 5, 22
)

// maxBytes bounds a request, and an option.
const maxBytes = 32 << 20

// negotiate lets the client choose the only export.
func (s *Server) negotiate(to io.Writer, from *bufio.Reader) error {
	var flags uint32
	err := errors.Join(write(to, uint64(magic), uint64(optionMagic), uint16(fixedNewstyle|noZeroes)), read(from, &flags))
	for err == nil {
		var head struct {
			Magic          uint64
			Option, Length uint32
		}
		if err = read(from, &head); err != nil {
			break
		}
		if head.Magic != optionMagic || head.Length > maxBytes {
			return fmt.Errorf("no option: %+v", head)
		}
		if _, err = from.Discard(int(head.Length)); err != nil {
			break
		}
		if head.Option != optionGo {
			err = write(to, uint64(optionReply), head.Option, uint32(unsupported), uint32(0))
			continue
		}
		return write(to, uint64(optionReply), head.Option, uint32(info), uint32(infoBytes), uint16(infoExport), s.bytes, uint16(hasFlags|takesFlushes),
			uint64(optionReply), head.Option, uint32(ack), uint32(0))
	}
	return err
}

type request struct {
	Magic       uint32
	Flags, Kind uint16
	Handle      uint64
	Offset      uint64
	Length      uint32
}

// request reads a request and answers it; an error ends the connection.
func (s *Server) request(from *bufio.Reader) error {
	var r request
	if err := read(from, &r); err != nil {
		return err
	}
	if r.Magic != requestMagic || r.Length > maxBytes {
		return fmt.Errorf("no request: %+v", r)
	}
	data := make([]byte, r.Length)
	switch r.Kind {
	case opRead:
		_, err := s.store.ReadAt(data, int64(r.Offset))
		return s.reply(r, data, err)
	case opWrite:
		if _, err := io.ReadFull(from, data); err != nil {
			return err
		}
		_, err := s.store.WriteAt(data, int64(r.Offset))
		return s.reply(r, nil, err)
	case opFlush:
		s.come()
		if s.all {
			return s.flush(r)
		}
		s.served.Go(func() { _ = s.flush(r) }) // fails only if the client has gone
		return nil
	case opEnd:
		return io.EOF
	}
	return s.send(replyMagic, errInvalid, r.Handle, nil)
}

func (s *Server) flush(r request) error {
	<-s.goOn
	return s.reply(r, nil, s.store.Sync())
}

// reply answers a request, which has succeeded or failed on the image.
func (s *Server) reply(r request, data []byte, failed error) error {
	if failed == nil {
		return s.send(replyMagic, 0, r.Handle, data)
	}
	s.mu.Lock()
	s.err = failed
	s.mu.Unlock()
	return s.send(replyMagic, errIO, r.Handle, nil)
}

func (s *Server) send(magic, failed uint32, handle uint64, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return write(s.conn, magic, failed, handle, data)
}

// read reads numbers, or structures of numbers, in the protocol's byte order.
func read(from io.Reader, into ...any) error {
	for _, one := range into {
		if err := binary.Read(from, binary.BigEndian, one); err != nil {
			return err
		}
	}
	return nil
}

// write writes numbers and bytes, all at once.
func write(to io.Writer, all ...any) (err error) {
	var text []byte
	for _, one := range all {
		if text, err = binary.Append(text, binary.BigEndian, one); err != nil {
			return err
		}
	}
	_, err = to.Write(text)
	return err
}
