package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

// The offered features, as bits. Indirect descriptors are not offered: a packet takes only two or
// three descriptors, and the table would be one more untrusted structure.
const (
	featureEventIdx         = 1 << 29 // VIRTIO_RING_F_EVENT_IDX
	featureProtocolFeatures = 1 << 30 // VHOST_USER_F_PROTOCOL_FEATURES
	featureVersion1         = 1 << 32 // VIRTIO_F_VERSION_1
	features                = featureEventIdx | featureProtocolFeatures | featureVersion1

	protocolReplyAck = 1 << 3
	protocolConfig   = 1 << 9
	protocolFeatures = protocolReplyAck | protocolConfig
)

// device is the back end of one vhost-user connection. It holds the guest's memory and its two
// queues, as described by the front end's messages.
type device struct {
	poll     *poller
	guestCID uint64

	acked    uint64 // virtio features
	protocol uint64 // vhost-user protocol features
	mem      *memory
	rings    [queueCount]ring

	// onRestart is called when the guest's driver restarts and so has forgotten all connections.
	onRestart func()
}

func newDevice(p *poller, guestCID uint64, onRestart func()) *device {
	d := &device{poll: p, guestCID: guestCID, onRestart: onRestart}
	for i := range d.rings {
		d.rings[i] = newRing()
	}
	return d
}

func (d *device) close() {
	for i := range d.rings {
		d.rings[i].close(d.poll)
	}
	if d.mem != nil {
		d.mem.close()
		d.mem = nil
	}
}

// running reports whether the guest's driver uses a queue.
func (d *device) running() bool {
	return d.rings[rxQueue].queue != nil || d.rings[txQueue].queue != nil
}

// broken reports whether the guest has broken a queue.
func (d *device) broken() bool { return d.rings[rxQueue].bad || d.rings[txQueue].bad }

// handlers of requests. A nil reply means that the request has no reply; it may still want an
// acknowledgement.
var handlers = map[request]func(*device, *message) ([]byte, error){
	reqGetFeatures:         func(*device, *message) ([]byte, error) { return uint64Reply(features), nil },
	reqSetFeatures:         (*device).setFeatures,
	reqSetOwner:            func(*device, *message) ([]byte, error) { return nil, nil },
	reqResetOwner:          (*device).reset,
	reqResetDevice:         (*device).reset,
	reqSetMemTable:         (*device).setMemTable,
	reqSetVringNum:         (*device).setVringNum,
	reqSetVringAddr:        (*device).setVringAddr,
	reqSetVringBase:        (*device).setVringBase,
	reqGetVringBase:        (*device).getVringBase,
	reqSetVringKick:        (*device).setVringKick,
	reqSetVringCall:        (*device).setVringCall,
	reqSetVringErr:         (*device).setVringErr,
	reqGetProtocolFeatures: func(*device, *message) ([]byte, error) { return uint64Reply(protocolFeatures), nil },
	reqSetProtocolFeatures: (*device).setProtocolFeatures,
	reqSetVringEnable:      (*device).setVringEnable,
	reqGetConfig:           (*device).getConfig,
}

// handle carries out a request, and closes those descriptors that the request did not take over. A
// reply that is not nil must be sent even if there is an error. After an error, the front end and
// this device may disagree about the device's state, so the connection must end.
func (d *device) handle(m *message) (reply []byte, err error) {
	defer closeFDs(m.fds)
	h, ok := handlers[m.request]
	if !ok {
		err = errors.New("not a request that we offered to serve")
	} else {
		reply, err = h(d, m)
	}
	if err != nil {
		err = fmt.Errorf("vhost-user request %d: %w", m.request, err)
	}
	if reply == nil && m.needReply && d.protocol&protocolReplyAck != 0 {
		reply = uint64Reply(0)
		if err != nil {
			reply = uint64Reply(1)
		}
	}
	return reply, err
}

func uint64Reply(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

func (d *device) setFeatures(m *message) ([]byte, error) {
	v, err := parseUint64(m.payload)
	if err != nil {
		return nil, err
	}
	if unknown := v &^ features; unknown != 0 {
		return nil, fmt.Errorf("feature bit %d was not offered", bits.TrailingZeros64(unknown))
	}
	d.acked = v
	if v&featureProtocolFeatures == 0 {
		// Without protocol features there is no SET_VRING_ENABLE either ("Ring states").
		for i := range d.rings {
			d.rings[i].enabled = true
		}
	}
	return nil, nil
}

func (d *device) setProtocolFeatures(m *message) ([]byte, error) {
	v, err := parseUint64(m.payload)
	if err != nil {
		return nil, err
	}
	if unknown := v &^ protocolFeatures; unknown != 0 {
		return nil, fmt.Errorf("protocol feature bit %d was not offered", bits.TrailingZeros64(unknown))
	}
	d.protocol = v
	return nil, nil
}

// reset disables the queues and forgets their state.
func (d *device) reset(*message) ([]byte, error) {
	for i := range d.rings {
		r := &d.rings[i]
		r.stop(d.poll)
		r.enabled, r.base = false, 0
	}
	d.onRestart()
	return nil, nil
}

// setMemTable replaces the memory. Running queues continue in the new memory.
func (d *device) setMemTable(m *message) ([]byte, error) {
	specs, err := parseMemTable(m.payload)
	if err != nil {
		return nil, err
	}
	mem, err := mapMemory(specs, m.fds)
	if err != nil {
		return nil, err
	}
	old := d.mem
	d.mem = mem
	for i := range d.rings {
		if err == nil && d.rings[i].queue != nil {
			d.rings[i].base = d.rings[i].queue.nextAvail
			err = d.startRing(i)
		}
	}
	if err != nil {
		// No queue may keep slices of memory that is about to be unmapped.
		for i := range d.rings {
			d.rings[i].stop(d.poll)
		}
	}
	if old != nil {
		old.close()
	}
	return nil, err
}

func (d *device) startRing(i int) error {
	if err := d.rings[i].start(d.mem, d.acked&featureEventIdx != 0); err != nil {
		return fmt.Errorf("queue %d: %w", i, err)
	}
	return nil
}

// ringOf checks the index in a vring state and returns the ring.
func (d *device) ringOf(m *message) (r *ring, num uint32, err error) {
	index, num, err := parseVringState(m.payload)
	if err != nil {
		return nil, 0, err
	}
	if index >= queueCount {
		return nil, 0, fmt.Errorf("queue %d, we have %d", index, queueCount)
	}
	return &d.rings[index], num, nil
}

var errStarted = errors.New("the queue is running: stop it first")

func (d *device) setVringNum(m *message) ([]byte, error) {
	r, num, err := d.ringOf(m)
	if err == nil && r.queue != nil {
		err = errStarted
	}
	if err == nil {
		r.num = num
	}
	return nil, err
}

func (d *device) setVringAddr(m *message) ([]byte, error) {
	a, err := parseVringAddr(m.payload)
	if err != nil {
		return nil, err
	}
	if a.index >= queueCount {
		return nil, fmt.Errorf("queue %d, we have %d", a.index, queueCount)
	}
	r := &d.rings[a.index]
	if r.queue != nil && (a.desc != r.addr.desc || a.used != r.addr.used || a.avail != r.addr.avail) {
		return nil, errStarted
	}
	r.addr, r.hasAddr = a, true
	return nil, nil
}

// setVringBase sets the position from which a queue continues. A paused VM continues where it
// stopped; any other position means that the driver has restarted.
func (d *device) setVringBase(m *message) ([]byte, error) {
	r, num, err := d.ringOf(m)
	if err != nil {
		return nil, err
	}
	if r.queue != nil {
		return nil, errStarted
	}
	if num > 0xffff {
		return nil, fmt.Errorf("base %d of a split ring", num)
	}
	if r.base != uint16(num) {
		r.base = uint16(num)
		d.onRestart()
	}
	return nil, nil
}

func (d *device) getVringBase(m *message) ([]byte, error) {
	r, _, err := d.ringOf(m)
	if err != nil {
		return nil, err
	}
	r.stop(d.poll)
	reply := append([]byte(nil), m.payload...)
	binary.LittleEndian.PutUint32(reply[4:], uint32(r.base))
	return reply, nil
}

func (d *device) setVringKick(m *message) ([]byte, error) {
	i, fd, err := takeEventFD(m)
	if err != nil {
		return nil, err
	}
	if fd < 0 {
		return nil, fmt.Errorf("queue %d without a kick eventfd: we do not poll", i)
	}
	r := &d.rings[i]
	r.stop(d.poll)
	if err := d.poll.add(fd, kickEvents, sourceKick, uint32(i)); err != nil {
		closeFDs([]int{fd})
		return nil, fmt.Errorf("kick eventfd of queue %d: %w", i, err)
	}
	r.kick = fd
	if r.bad {
		r.bad = false
		d.onRestart()
	}
	return nil, d.startRing(i)
}

func (d *device) setVringCall(m *message) ([]byte, error) {
	i, fd, err := takeEventFD(m)
	if err != nil {
		return nil, err
	}
	r := &d.rings[i]
	closeFDs([]int{r.call})
	r.call = fd
	// A signal to the old eventfd may be lost.
	signal(fd)
	return nil, nil
}

func (d *device) setVringErr(m *message) ([]byte, error) {
	i, fd, err := takeEventFD(m)
	if err != nil {
		return nil, err
	}
	closeFDs([]int{d.rings[i].err})
	d.rings[i].err = fd
	return nil, nil
}

func (d *device) setVringEnable(m *message) ([]byte, error) {
	r, num, err := d.ringOf(m)
	if err != nil {
		return nil, err
	}
	if num > 1 {
		return nil, fmt.Errorf("enable %d, want 0 or 1", num)
	}
	r.enabled = num == 1
	return nil, nil
}

// getConfig answers with struct virtio_vsock_config: the guest's CID. As vhost-user.rst requires,
// the answer to a request for other bytes is an empty payload.
func (d *device) getConfig(m *message) ([]byte, error) {
	offset, size, err := parseConfigRequest(m.payload)
	if err != nil {
		return nil, err
	}
	config := binary.LittleEndian.AppendUint64(nil, d.guestCID)
	if uint64(offset)+uint64(size) > uint64(len(config)) {
		return []byte{}, nil
	}
	reply := append([]byte(nil), m.payload[:configHeaderSize]...)
	return append(reply, config[offset:offset+size]...), nil
}
