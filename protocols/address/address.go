// Package address parses and dials the addresses at which an agent's ttrpc server can be reached:
//
//	vsock://CID:PORT      vsock(7), AF_VSOCK of the kernel
//	hvsock:///path:PORT   hybrid vsock: a unix socket whose other side connects to a guest's port on "CONNECT PORT\n",
//	                      as in Firecracker's vsock device (docs/vsock.md) and vhost-device-vsock
//	unix:///path          a unix socket; unix://@name is in the abstract namespace of unix(7)
package address

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Scheme is the kind of an address.
type Scheme string

// The schemes that Parse accepts.
const (
	VSock  Scheme = "vsock"
	HVSock Scheme = "hvsock"
	Unix   Scheme = "unix"
)

// MaxPath is the greatest length of a unix socket's name, in bytes. sun_path of unix(7) has 108
// bytes including the terminating zero, and four are needed for the temporary name that ListenUnix
// uses. So ListenUnix accepts every address.
const MaxPath = 103

// Address is one address to dial. Addresses can be compared with ==. Dial checks an Address that
// was not made by Parse.
type Address struct {
	Scheme Scheme
	CID    uint32 // vsock: the machine's context ID
	Port   uint32 // vsock and hvsock
	Path   string // hvsock and unix: an absolute path; unix also "@name", abstract
}

// Parse parses an address in the notation of the package comment.
func Parse(text string) (Address, error) {
	scheme, rest, found := strings.Cut(text, "://")
	if !found {
		return Address{}, fmt.Errorf("address %.160q: no scheme: want vsock://CID:PORT, hvsock:///path:PORT or unix:///path", text)
	}
	a := Address{Scheme: Scheme(scheme), Path: rest}
	if a.Scheme == VSock || a.Scheme == HVSock {
		colon := strings.LastIndexByte(rest, ':')
		if colon < 0 {
			return Address{}, fmt.Errorf("address %.160q: no port: want it after the last colon", text)
		}
		var err error
		if a.Port, err = number(rest[colon+1:]); err != nil {
			return Address{}, fmt.Errorf("address %.160q: port: %w", text, err)
		}
		a.Path = rest[:colon]
	}
	if a.Scheme == VSock {
		var err error
		if a.CID, err = number(a.Path); err != nil {
			return Address{}, fmt.Errorf("address %.160q: context ID: %w", text, err)
		}
		a.Path = ""
	}
	if err := a.check(); err != nil {
		return Address{}, fmt.Errorf("address %.160q: %w", text, err)
	}
	return a, nil
}

// String returns the address in the notation that Parse accepts.
func (a Address) String() string {
	switch a.Scheme {
	case VSock:
		return fmt.Sprintf("%s://%d:%d", a.Scheme, a.CID, a.Port)
	case HVSock:
		return fmt.Sprintf("%s://%s:%d", a.Scheme, a.Path, a.Port)
	default:
		return fmt.Sprintf("%s://%s", a.Scheme, a.Path)
	}
}

// number parses a port or a context ID. It refuses the highest value, which is the kernel's
// wildcard (VMADDR_CID_ANY, VMADDR_PORT_ANY of vsock(7)).
func number(digits string) (uint32, error) {
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return 0, fmt.Errorf("%.20q is not a number from 0 to %d", digits, uint32(math.MaxUint32-1))
	}
	return uint32(n), nil
}

func (a Address) check() error {
	switch a.Scheme {
	case VSock:
		return nil
	case HVSock, Unix:
		abstract := a.Scheme == Unix && strings.HasPrefix(a.Path, "@") && len(a.Path) > 1
		switch {
		case !strings.HasPrefix(a.Path, "/") && !abstract:
			return errors.New("the socket's path must be absolute")
		case strings.ContainsRune(a.Path, 0):
			return errors.New("the socket's path contains a zero byte")
		}
		return checkLength(a.Path)
	default:
		return fmt.Errorf("unknown scheme %.20q: want vsock, hvsock or unix", a.Scheme)
	}
}

func checkLength(path string) error {
	if len(path) > MaxPath {
		return fmt.Errorf("socket path %.160q has %d bytes, the limit is %d: choose a shorter one", path, len(path), MaxPath)
	}
	return nil
}
