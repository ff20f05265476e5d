// Package agentclient calls the agent in a guest and does not trust its answers. Every call and
// every write has a time limit. An answer that no honest agent gives is an error: too long, not
// UTF-8, more available than the total, or to a call that was not made. Texts in answers are
// returned with printable characters only.
//
// If a connection breaks, the client connects again. It repeats an unanswered call if that does no
// harm (methods.go lists the calls); otherwise the error is ErrOutcomeUnknown. A watch and a growth
// with progress have their own connections and are not repeated (stream.go).
//
// The protocol is ttrpc (github.com/containerd/ttrpc, PROTOCOL.md) with the services of
// protocols/agentpb and protocols/volumepb.
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

// Vsock is a guest's vsock connection, which may end for good before the client does. host/qemu's
// VM implements it.
type Vsock interface {
	// VsockDone returns a channel that is closed when the guest cannot be reached any more.
	VsockDone() <-chan struct{}
	// VsockErr returns the reason after that channel is closed.
	VsockErr() error
}

// Config configures a Client. The zero value is ready to use.
type Config struct {
	// Timeout limits a call whose context has no deadline, and each write to a guest that does not
	// read. 0 means 10 s.
	Timeout time.Duration
	// Vsock is the vsock that the address uses. After it has ended, calls fail at once, with its
	// reason in their errors. Nil means a connection that does not end for good.
	Vsock Vsock
}

// Client calls one agent, over one connection at a time. It is safe for concurrent use. While the
// agent cannot be reached, calls wait until their deadlines. After Close they fail with
// codes.Unavailable.
type Client struct {
	address address.Address
	timeout time.Duration
	vsock   Vsock

	life context.Context // ends at Close, or with vsock; its cause is errClosed or errLost
	end  context.CancelCauseFunc

	turn chan struct{} // full while a goroutine reads or replaces link
	link *link         // the last connection; nil before the first
}

// New returns a client for the agent at a. It dials at the first call. The caller must close the
// Client.
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

// Dial is like New, but dials once before returning, so that an address where nothing listens is
// reported at once.
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

// watchVsock ends the client's life when vsock ends.
func (c *Client) watchVsock() {
	select {
	case <-c.vsock.VsockDone():
		c.end(errLost)
	case <-c.life.Done():
	}
}

// Close ends the connection. Calls in progress fail with codes.Unavailable. Close returns nil.
func (c *Client) Close() error {
	c.end(errClosed)
	c.turn <- struct{}{} // a dial in progress ends with life
	defer func() { <-c.turn }()
	if c.link != nil {
		c.link.close()
	}
	return nil
}

// Check returns nil if the agent is ready, and otherwise the reason why not.
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

// DestroySandbox unmounts everything in the guest. If the agent is so configured, it powers the
// guest off after its answer.
func (c *Client) DestroySandbox(ctx context.Context) error {
	return c.do(ctx, destroySandbox, &agentpb.DestroySandboxRequest{})
}

// CreateContainer mounts the request's storages and makes the container.
func (c *Client) CreateContainer(ctx context.Context, request *agentpb.CreateContainerRequest) error {
	return c.do(ctx, createContainer, request)
}

// RemoveContainer ends a container and unmounts the storages that no other container uses.
func (c *Client) RemoveContainer(ctx context.Context, containerID string) error {
	return c.do(ctx, removeContainer, &agentpb.RemoveContainerRequest{ContainerId: containerID})
}

// GetVolumeStats returns the usage and the condition of the volume at a path in the guest
// (protocols/guestpath).
func (c *Client) GetVolumeStats(ctx context.Context, guestPath string) (*agentpb.VolumeStatsResponse, error) {
	return checked(ctx, c, getVolumeStats, &agentpb.VolumeStatsRequest{VolumeGuestPath: guestPath}, checkStats)
}

// GetVolumeHealth returns the abnormal conditions of the volume at a path in the guest; none if the
// volume is healthy. An agent without directvol's service answers as described for
// CheckResizeVolume.
func (c *Client) GetVolumeHealth(ctx context.Context, guestPath string) ([]*volumepb.Condition, error) {
	health, err := checked(ctx, c, getVolumeHealth, &volumepb.GetVolumeHealthRequest{VolumeGuestPath: guestPath}, checkHealth)
	if err != nil {
		return nil, err
	}
	return health.Conditions, nil
}

// ListVolumes returns the volumes that are mounted in the guest, sorted by path. An agent without
// directvol's service answers as described for CheckResizeVolume.
func (c *Client) ListVolumes(ctx context.Context) ([]*volumepb.Volume, error) {
	list, err := checked(ctx, c, listVolumes, &volumepb.ListVolumesRequest{}, checkVolumes)
	if err != nil {
		return nil, err
	}
	return list.Volumes, nil
}

// GetVolume returns what the agent knows of the volume at a path in the guest.
func (c *Client) GetVolume(ctx context.Context, guestPath string) (*volumepb.Volume, error) {
	return checked(ctx, c, getVolume, &volumepb.GetVolumeRequest{VolumeGuestPath: guestPath}, checkVolume)
}

// ResizeVolume grows the filesystem at a path in the guest to size, its disk's size in bytes. If
// size is 0, it grows the filesystem to the device's end.
func (c *Client) ResizeVolume(ctx context.Context, guestPath string, size uint64) error {
	return c.do(ctx, resizeVolume, &agentpb.ResizeVolumeRequest{VolumeGuestPath: guestPath, Size_: size})
}

// CheckResizeVolume checks whether ResizeVolume could grow the filesystem at a path in the guest to
// size, once its disk has that size. If size is 0, it checks whether the filesystem can grow at
// all. It changes nothing. An agent without directvol's service answers with an error that
// LacksService knows.
func (c *Client) CheckResizeVolume(ctx context.Context, guestPath string, size uint64) error {
	return c.do(ctx, checkResizeVolume, &volumepb.CheckResizeVolumeRequest{VolumeGuestPath: guestPath, Size_: size})
}

// CheckReleased returns nil if the guest does not use a device any more, so that its disk can be
// removed (protocols/proto/volume.proto specifies the promise). driver and source name the device,
// as in a Storage. The agent answers after all earlier calls for containerID have ended, including
// abandoned ones; containerID may be empty. An agent without directvol's service answers as for
// CheckResizeVolume.
func (c *Client) CheckReleased(ctx context.Context, driver, source, containerID string) error {
	return c.do(ctx, checkReleased, &volumepb.CheckReleasedRequest{Driver: driver, Source: source, ContainerId: containerID})
}

// GetGuestDetails returns the capabilities of the guest and the agent.
func (c *Client) GetGuestDetails(ctx context.Context) (*agentpb.GuestDetailsResponse, error) {
	return checked(ctx, c, getGuestDetails, &agentpb.GuestDetailsRequest{MemBlockSize: true, MemHotplugProbe: true}, checkDetails)
}

// do makes a call whose answer is empty.
func (c *Client) do(ctx context.Context, m method, request proto.Message) error {
	_, err := call[emptypb.Empty](ctx, c, m, request)
	return err
}

// checked makes a call and refuses the answer if check fails.
func checked[R any, PR service.Message[R]](ctx context.Context, c *Client, m method, request proto.Message, check func(PR) error) (PR, error) {
	response, err := call[R, PR](ctx, c, m, request)
	if err != nil {
		return nil, err
	}
	if err := check(response); err != nil {
		return nil, c.refuse(m, codes.Internal, "the guest's answer is invalid: %v", err)
	}
	return response, nil
}

// refuse returns the error for an unusable answer.
func (c *Client) refuse(m method, code codes.Code, format string, args ...any) error {
	return &callError{method: m, address: c.address, status: status.New(code, printable(fmt.Sprintf(format, args...)))}
}
