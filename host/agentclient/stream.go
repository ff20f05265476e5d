package agentclient

import (
	"context"
	"iter"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

// WatchVolumes follows the volumes of the guest. The events are an ADDED event for each mounted
// volume, a RESYNCED event, and then one for each change, in order. The last element has the error
// that ended the watch: that of ctx, codes.Unavailable if the agent ends or the connection breaks,
// or one that LacksService knows. A watch has no limit but ctx's.
//
// No event is lost silently. A caller that takes the events more slowly than they happen gets a
// RESYNC event. A watch that broke is not repeated: its events say what the caller knows, and only
// the caller can forget that. A new watch begins with all volumes, as after a RESYNC.
//
// Each watch has its own connection, until the caller leaves the loop.
func (c *Client) WatchVolumes(ctx context.Context) iter.Seq2[*volumepb.VolumeEvent, error] {
	return func(yield func(*volumepb.VolumeEvent, error) bool) {
		all := known{volumes: map[string]knownVolume{}}
		stream(ctx, c, watchVolumes, &volumepb.WatchVolumesRequest{}, all.check)(yield)
	}
}

// GrowVolume is ResizeVolume with progress: it calls step, unless that is nil, with the
// filesystem's end after each step of the growth. It has no limit but ctx's. If it fails, or ctx
// ends, the growth stops between two steps at a consistent size: the same call made again
// continues. It is not repeated by itself. It has its own connection.
func (c *Client) GrowVolume(ctx context.Context, guestPath string, size uint64, step func(*volumepb.GrowVolumeProgress)) error {
	request := &volumepb.GrowVolumeRequest{VolumeGuestPath: guestPath, Size_: size}
	for progress, err := range stream(ctx, c, growVolume, request, checkProgress) {
		if err != nil {
			return err
		}
		if step != nil {
			step(progress)
		}
		if progress.Done {
			return nil
		}
	}
	return nil // cannot happen: a stream that ends has an error
}

// stream makes a call that is answered with a stream, on a connection of its own: the agent notices
// a caller that leaves only by the end of its connection, and no other call waits for a message of
// the stream. The last element has the error that ended the stream, also where the agent has ended
// it without one.
func stream[R any, PR service.Message[R]](ctx context.Context, c *Client, m method, request proto.Message, check func(PR) error) iter.Seq2[PR, error] {
	return func(yield func(PR, error) bool) {
		ctx, cancel := c.whileAlive(ctx)
		defer cancel()
		link, failure := c.streamLink(ctx)
		if failure != nil {
			yield(nil, c.failure(ctx, m, failure))
			return
		}
		defer link.close()
		defer context.AfterFunc(ctx, link.close)() // ends a write, too
		for message, err := range service.Receive[R, PR](ctx, link.client, m.service, m.name, request) {
			if err != nil {
				yield(nil, c.failure(ctx, m, link.failed(ctx, err, link.conn.hasReplied(), true)))
				return
			}
			link.conn.took()
			if err := check(message); err != nil {
				yield(nil, c.refuse(m, codes.Internal, "the guest's answer is invalid: %v", err))
				return
			}
			if !yield(message, nil) {
				return
			}
		}
		yield(nil, c.refuse(m, codes.Unavailable, "the agent has ended the stream"))
	}
}

// streamLink dials until it has a connection for a stream, as long as a call would.
func (c *Client) streamLink(ctx context.Context) (*link, *failed) {
	if c.life.Err() != nil { // ctx ends a moment after life
		return nil, &failed{kind: broken, err: status.Error(codes.Unavailable, context.Cause(c.life).Error())}
	}
	ctx, cancel := c.limit(ctx)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		link, err := c.dial(ctx, newStreamConn)
		if err == nil {
			return link, nil
		}
		if !wait(ctx, pause) {
			return nil, &failed{kind: broken, err: status.Error(codes.Unavailable, err.Error())}
		}
	}
}
