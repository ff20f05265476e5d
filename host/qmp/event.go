package qmp

import (
	"encoding/json"
	"time"
)

// eventBuffer is how many events wait for a subscriber before further ones are dropped.
const eventBuffer = 64

// Event is something that QEMU tells on its own.
type Event struct {
	// Name is the event's name in QEMU's QAPI schema, like DEVICE_DELETED.
	Name string
	// Data is the event's members as JSON, nil where it has none.
	Data json.RawMessage
	// Time is when it was read. Events and answers of a connection are read in the order in which QEMU has sent them, and this
	// time does not follow the host's clock when that is set, as QEMU's own timestamps do.
	Time time.Time
}

// Subscription receives the events of some names. It belongs to its subscriber, who closes it. A subscriber that does not
// read holds up nothing: what finds its buffer full is dropped and counted.
type Subscription struct {
	client  *Client
	names   map[string]bool
	events  chan Event
	dropped uint64 // guarded by client.mu
}

// Subscribe returns a subscription to the events of these names, from now on. To miss nothing, subscribe before the command
// that causes the event. The subscription outlives a connection that is lost and dialled again; what happened in between comes
// where the Client's Settle derives it.
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

// Events returns the channel of events, in their order. It is closed when the subscription or the Client ends.
func (s *Subscription) Events() <-chan Event { return s.events }

// Dropped returns how many events were lost because nobody read.
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

// publish gives an event to its subscribers and never blocks.
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
