package agentclient

import (
	"fmt"

	"github.com/directvol/directvol/protocols/volumepb"
)

// known bounds what a watcher has to remember of the volumes: a guest may add volumes without end.
// Those of a list fit into a list's answer; while a RESYNC lasts, a watcher knows those of before,
// too.
type known struct {
	volumes map[string]knownVolume // by path
	bytes   int                    // of all of them, encoded
	resyncs int
}

// knownVolume is the last event of a volume.
type knownVolume struct {
	bytes   int
	resyncs int // before it was added
}

// check refuses what checkEvent refuses, and an event with which there are too many volumes.
func (k *known) check(e *volumepb.VolumeEvent) error {
	if err := checkEvent(e); err != nil {
		return err
	}
	switch e.Type {
	case volumepb.VolumeEvent_RESYNC:
		k.resyncs++
	case volumepb.VolumeEvent_RESYNCED:
		for path, v := range k.volumes {
			if v.resyncs < k.resyncs {
				k.forget(path)
			}
		}
	default:
		k.forget(e.Volume.VolumeGuestPath)
		if e.Type != volumepb.VolumeEvent_REMOVED {
			size := e.Volume.Size()
			k.volumes[e.Volume.VolumeGuestPath] = knownVolume{size, k.resyncs}
			k.bytes += size
		}
	}
	if len(k.volumes) > 2*maxVolumes || k.bytes > 2*maxAnswer {
		return fmt.Errorf("a watch of %d volumes of %d bytes, at most %d of %d are valid", len(k.volumes), k.bytes, 2*maxVolumes, 2*maxAnswer)
	}
	return nil
}

func (k *known) forget(path string) {
	k.bytes -= k.volumes[path].bytes
	delete(k.volumes, path)
}
