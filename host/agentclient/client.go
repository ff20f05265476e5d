// Package agentclient calls the agent in a guest, and believes nothing of what it answers: every call and every write has a limit, and an answer that
// no honest agent gives, too long, no UTF-8, more available than there is, to a call that was not made, is an error. A text that comes back holds only
// printable characters.
//
// A connection that breaks is made again, and a call that was not answered is made again where that does no harm (methods.go has the table). Where it
// may do harm the error is ErrOutcomeUnknown.
//
// The protocol is ttrpc (github.com/containerd/ttrpc, PROTOCOL.md) with the services of protocols/agentpb and protocols/volumepb.
package agentclient

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

const defaultTimeout = 10 * time.Second

// Vsock is the way to a guest, where it can end for good before the client does. host/qemu's VM is one.
type Vsock interface {
	// VsockDone returns a channel that is closed when the guest cannot be reached any more.
	VsockDone() <-chan struct{}
	// VsockErr returns why, once it is closed.
	VsockErr() error
}

// Config is how a Client behaves. The zero value is ready to use.
type Config struct {
	// Timeout is the limit of a call whose context has no deadline, and of each write to a guest that does not read. 10 s where it is 0.
	Timeout time.Duration
	// Vsock is what the address leads through. When it has ended, calls fail at once, with its reason in their errors. Nil is a way that does not end.
	Vsock Vsock
}

// Client calls one agent, over one connection at a time. It is safe for concurrent use. Its calls wait for an agent that cannot be reached until their
// deadlines; after Close they fail with codes.Unavailable.
type Client struct {
	address address.Address
	timeout time.Duration
	vsock   Vsock

	life context.Context // ends with Close or with vsock: its cause is errClosed or errLost
	end  context.CancelCauseFunc

	turn chan struct{} // full for as long as somebody looks at link or replaces it
	link *link         // the last connection, nil before the first
}

// New returns a client of the agent at a, which is dialled when the first call is made. The Client is the caller's to close.
func New(a address.Address, config Config) *Client {
	c := &Client{address: a, timeout: config.Timeout, vsock: config.Vsock, turn: make(chan struct{}, 1)}
	if c.timeout == 0 {
		c.timeout = defaultTimeout
	}
	c.life, c.end = context.WithCancelCause(context.Background())
	if c.vsock != nil {
		go c.watchVsock()
	}
	return c
}

// Dial is New, and dials once, so that an address where nobody is shows at once.
func Dial(ctx context.Context, a address.Address, config Config) (*Client, error) {
	c := New(a, config)
	ctx, cancel := c.limit(ctx)
	defer cancel()
	if _, err := c.connected(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// watchVsock ends the client's life with its vsock's.
func (c *Client) watchVsock() {
	select {
	case <-c.vsock.VsockDone():
		c.end(errLost)
	case <-c.life.Done():
	}
}

// Close ends the connection, and the calls that are under way with codes.Unavailable. It returns nil.
func (c *Client) Close() error {
	c.end(errClosed)
	c.turn <- struct{}{} // a dial under way ends with life
	defer func() { <-c.turn }()
	if c.link != nil {
		c.link.close()
	}
	return nil
}

// Check asks whether the agent is ready; an error says why not.
func (c *Client) Check(ctx context.Context) error {
	response, err := call[agentpb.HealthCheckResponse](ctx, c, check, &agentpb.CheckRequest{})
	if err != nil {
		return err
	}
	if response.Status != agentpb.HealthCheckResponse_SERVING {
		return c.refuse(check, codes.Unavailable, "the agent is not ready: %v", response.Status)
	}
	return nil
}

// Version returns the versions of the protocol and of the agent.
func (c *Client) Version(ctx context.Context) (*agentpb.VersionCheckResponse, error) {
	return checked(ctx, c, version, &agentpb.CheckRequest{}, checkVersion)
}

// CreateSandbox makes the guest ready for containers.
func (c *Client) CreateSandbox(ctx context.Context, request *agentpb.CreateSandboxRequest) error {
	return c.do(ctx, createSandbox, request)
}

// DestroySandbox unmounts everything in the guest. An agent that is told to powers the guest off after its answer.
func (c *Client) DestroySandbox(ctx context.Context) error {
	return c.do(ctx, destroySandbox, &agentpb.DestroySandboxRequest{})
}

// CreateContainer mounts the request's storages and makes the container.
func (c *Client) CreateContainer(ctx context.Context, request *agentpb.CreateContainerRequest) error {
	return c.do(ctx, createContainer, request)
}

// RemoveContainer ends a container and unmounts the storages that were its alone.
func (c *Client) RemoveContainer(ctx context.Context, containerID string) error {
	return c.do(ctx, removeContainer, &agentpb.RemoveContainerRequest{ContainerId: containerID})
}

// GetVolumeStats returns the usage and the condition of the volume at a path in the guest (protocols/guestpath).
func (c *Client) GetVolumeStats(ctx context.Context, guestPath string) (*agentpb.VolumeStatsResponse, error) {
	return checked(ctx, c, getVolumeStats, &agentpb.VolumeStatsRequest{VolumeGuestPath: guestPath}, checkStats)
}

// GetVolumeHealth returns what is wrong with the volume at a path in the guest: nothing of a healthy one. An agent without directvol's service answers
// as CheckResizeVolume says.
func (c *Client) GetVolumeHealth(ctx context.Context, guestPath string) ([]*volumepb.Condition, error) {
	health, err := checked(ctx, c, getVolumeHealth, &volumepb.GetVolumeHealthRequest{VolumeGuestPath: guestPath}, checkHealth)
	if err != nil {
		return nil, err
	}
	return health.Conditions, nil
}

// ResizeVolume grows the filesystem at a path in the guest to its disk's size in bytes, or to the device's end where size is 0.
func (c *Client) ResizeVolume(ctx context.Context, guestPath string, size uint64) error {
	return c.do(ctx, resizeVolume, &agentpb.ResizeVolumeRequest{VolumeGuestPath: guestPath, Size_: size})
}

// CheckResizeVolume asks whether ResizeVolume could grow the filesystem at a path in the guest to size, once its disk has that; 0 asks whether it can
// grow at all. It changes nothing. An agent without directvol's service answers codes.Unimplemented, or, as Rust's ttrpc does, codes.InvalidArgument ("… service does not exist").
func (c *Client) CheckResizeVolume(ctx context.Context, guestPath string, size uint64) error {
	return c.do(ctx, checkResizeVolume, &volumepb.CheckResizeVolumeRequest{VolumeGuestPath: guestPath, Size_: size})
}

// CheckReleased asks whether nothing in the guest uses the device of a Storage's driver and source any more, so that the disk can be pulled
// (protocols/proto/volume.proto says what is promised). The answer comes when the calls of containerID that were sent before have ended, those that
// were given up too; it may be empty. An agent without directvol's service answers as to CheckResizeVolume.
func (c *Client) CheckReleased(ctx context.Context, driver, source, containerID string) error {
	return c.do(ctx, checkReleased, &volumepb.CheckReleasedRequest{Driver: driver, Source: source, ContainerId: containerID})
}

// GetGuestDetails returns what guest and agent can do.
func (c *Client) GetGuestDetails(ctx context.Context) (*agentpb.GuestDetailsResponse, error) {
	return checked(ctx, c, getGuestDetails, &agentpb.GuestDetailsRequest{MemBlockSize: true, MemHotplugProbe: true}, checkDetails)
}

// do makes a call that answers nothing.
func (c *Client) do(ctx context.Context, m method, request proto.Message) error {
	_, err := call[emptypb.Empty](ctx, c, m, request)
	return err
}

// checked makes a call and refuses its answer where check does.
func checked[R any, PR service.Message[R]](ctx context.Context, c *Client, m method, request proto.Message, check func(PR) error) (PR, error) {
	response, err := call[R, PR](ctx, c, m, request)
	if err != nil {
		return nil, err
	}
	if err := check(response); err != nil {
		return nil, c.refuse(m, codes.Internal, "the guest answered nonsense: %v", err)
	}
	return response, nil
}

// refuse is the error of an answer that is of no use.
func (c *Client) refuse(m method, code codes.Code, format string, args ...any) error {
	return &callError{method: m, address: c.address, status: status.New(code, printable(fmt.Sprintf(format, args...)))}
}
