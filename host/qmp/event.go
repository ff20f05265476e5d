package qmp

import (
	"encoding/json"
	"time"
)

// eventBuffer is how many events are buffered for a subscriber before further events are dropped.
const eventBuffer = 64

// Event is a message that QEMU sends on its own initiative.
type Event struct {
	// Name is the event's name in QEMU's QAPI schema, like DEVICE_DELETED.
	Name string
	// Data contains the event's members as JSON; nil if it has none.
	Data json.RawMessage
	// Time is when the client read the event. Events and answers of a connection are read in the
	// order in which QEMU has sent them. Unlike QEMU's own timestamps, Time is not affected when
	// the host's clock is set.
	Time time.Time
}

// Subscription receives the events with certain names. The subscriber owns it and must close it. A
// subscriber that does not read blocks nothing: if its buffer is full, events are dropped and
// counted.
type Subscription struct {
	client  *Client
	names   map[string]bool
	events  chan Event
	dropped uint64 // guarded by client.mu
}

// Subscribe returns a subscription to future events with these names. To miss no event, subscribe
// before the command that causes it. The subscription continues when a lost connection is replaced.
// Events from the time in between arrive only if the Client's Settle derives them.
func (c *Client) Subscribe(names ...string) *Subscription {
	s := &Subscription{client: c, names: make(map[string]bool), events: make(chan Event, eventBuffer)}
	for _, name := range names {
		s.names[name] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		close(s.events)
		return s
	}
	c.subscriptions[s] = struct{}{}
	return s
}

// Events returns the channel of events, in order. It is closed when the subscription or the Client
// ends.
func (s *Subscription) Events() <-chan Event { return s.events }

// Dropped returns how many events were lost because the buffer was full.
func (s *Subscription) Dropped() uint64 {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	return s.dropped
}

// Close ends the subscription. It may be called more than once.
func (s *Subscription) Close() {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	if _, ok := s.client.subscriptions[s]; ok {
		delete(s.client.subscriptions, s)
		close(s.events)
	}
}

// publish sends an event to its subscribers. It never blocks.
func (c *Client) publish(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.subscriptions {
		if !s.names[e.Name] {
			continue
		}
		select {
		case s.events <- e:
		default:
			s.dropped++
		}
	}
}
