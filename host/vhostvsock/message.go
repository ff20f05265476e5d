package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// request is the first word of a vhost-user message. The numbers are from QEMU's
// docs/interop/vhost-user.rst, "Front-end message types".
type request uint32

const (
	reqGetFeatures         request = 1
	reqSetFeatures         request = 2
	reqSetOwner            request = 3
	reqResetOwner          request = 4
	reqSetMemTable         request = 5
	reqSetVringNum         request = 8
	reqSetVringAddr        request = 9
	reqSetVringBase        request = 10
	reqGetVringBase        request = 11
	reqSetVringKick        request = 12
	reqSetVringCall        request = 13
	reqSetVringErr         request = 14
	reqGetProtocolFeatures request = 15
	reqSetProtocolFeatures request = 16
	reqSetVringEnable      request = 18
	reqGetConfig           request = 24
	reqResetDevice         request = 34
)

// The flags in the message header, and this package's limits for a message. The longest supported
// message is SET_MEM_TABLE with 8 regions: 264 bytes, 8 descriptors.
const (
	messageHeaderSize = 12
	maxPayload        = 512
	maxRegions        = 8

	versionMask   = 0x3
	version1      = 0x1
	flagReply     = 1 << 2
	flagNeedReply = 1 << 3

	// vringNoFD, in SET_VRING_KICK, CALL and ERR, means that no descriptor is attached.
	vringNoFD = 1 << 8
)

// message is one vhost-user request. The receiver owns its fds.
type message struct {
	request   request
	needReply bool
	payload   []byte
	fds       []int
}

// parseMessageHeader parses the 12 bytes before every message.
func parseMessageHeader(b []byte) (req request, flags uint32, size int, err error) {
	if len(b) < messageHeaderSize {
		return 0, 0, 0, fmt.Errorf("vhost-user header of %d bytes, want %d", len(b), messageHeaderSize)
	}
	req = request(binary.LittleEndian.Uint32(b))
	flags = binary.LittleEndian.Uint32(b[4:])
	length := binary.LittleEndian.Uint32(b[8:])
	if flags&versionMask != version1 {
		return 0, 0, 0, fmt.Errorf("vhost-user request %d has version %d, want 1", req, flags&versionMask)
	}
	if length > maxPayload {
		return 0, 0, 0, fmt.Errorf("vhost-user request %d announces %d bytes, limit %d", req, length, maxPayload)
	}
	return req, flags, int(length), nil
}

// messageReader assembles messages from a non-blocking stream socket. It never reads beyond the
// current message, so that the descriptors it collects belong to that message.
type messageReader struct {
	buf  [messageHeaderSize + maxPayload]byte
	have int
	fds  []int
}

// read reads the next message from fd. It returns nil without an error if the message is not
// complete yet, io.EOF if the peer closed between two messages, and io.ErrUnexpectedEOF if the peer
// closed within one. The payload is valid until the next call.
func (r *messageReader) read(fd int) (*message, error) {
	for {
		want := messageHeaderSize
		var req request
		var flags uint32
		if r.have >= messageHeaderSize {
			var size int
			var err error
			if req, flags, size, err = parseMessageHeader(r.buf[:r.have]); err != nil {
				return nil, err
			}
			want += size
		}
		if r.have >= messageHeaderSize && r.have == want {
			m := &message{request: req, needReply: flags&flagNeedReply != 0, payload: r.buf[messageHeaderSize:want], fds: r.fds}
			r.have, r.fds = 0, nil
			return m, nil
		}
		n, err := r.receive(fd, r.buf[r.have:want])
		if errors.Is(err, unix.EAGAIN) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		r.have += n
	}
}

// receive calls recvmsg(2) once, and appends received descriptors to r.fds.
func (r *messageReader) receive(fd int, b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxRegions))
	n, oobn, flags, _, err := unix.Recvmsg(fd, b, oob, unix.MSG_CMSG_CLOEXEC)
	for errors.Is(err, unix.EINTR) {
		n, oobn, flags, _, err = unix.Recvmsg(fd, b, oob, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return 0, fmt.Errorf("recvmsg from the front end: %w", err)
	}
	fds, err := parseRights(oob[:oobn])
	r.fds = append(r.fds, fds...)
	switch {
	case err != nil:
		return 0, err
	case flags&unix.MSG_CTRUNC != 0 || len(r.fds) > maxRegions:
		return 0, fmt.Errorf("vhost-user message with more than %d descriptors", maxRegions)
	case n == 0 && r.have == 0:
		return 0, io.EOF
	case n == 0:
		return 0, io.ErrUnexpectedEOF
	}
	return n, nil
}

// parseRights returns the descriptors in a control message buffer.
func parseRights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message from the front end: %w", err)
	}
	var fds []int
	for i := range controls {
		got, err := unix.ParseUnixRights(&controls[i])
		if err != nil {
			return fds, fmt.Errorf("control message from the front end: %w", err)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// close drops an incomplete message.
func (r *messageReader) close() {
	closeFDs(r.fds)
	r.have, r.fds = 0, nil
}

// closeFDs closes all fds except those that were taken over and set to -1.
func closeFDs(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// writeReply sends the reply to a request.
func writeReply(fd int, req request, payload []byte) error {
	b := make([]byte, messageHeaderSize, messageHeaderSize+len(payload))
	binary.LittleEndian.PutUint32(b, uint32(req))
	binary.LittleEndian.PutUint32(b[4:], version1|flagReply)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(payload)))
	b = append(b, payload...)
	n, err := unix.SendmsgN(fd, b, nil, nil, unix.MSG_NOSIGNAL)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.SendmsgN(fd, b, nil, nil, unix.MSG_NOSIGNAL)
	}
	if err != nil {
		return fmt.Errorf("reply to vhost-user request %d: %w", req, err)
	}
	if n != len(b) {
		return fmt.Errorf("reply to vhost-user request %d: %w", req, io.ErrShortWrite)
	}
	return nil
}
