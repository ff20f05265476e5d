package sandbox

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
)

// maxVolumeID is the greatest length of a volume's id in bytes, as in CSI.
const maxVolumeID = 128

// checkID refuses an empty or too long volume id. Any bytes are allowed, so an id may be a path.
func checkID(id string) error {
	if id == "" || len(id) > maxVolumeID {
		return also(ErrInfeasible, fmt.Errorf("volume id %.140q: want 1 to %d bytes, got %d", id, maxVolumeID, len(id)))
	}
	return nil
}

// DiskID returns the id of a volume's disk: 18 letters and digits, derived from the volume's id
// alone. So the disk can be found even if all other state is lost. DiskID is the serial number that
// the guest sees; virtio allows 20 bytes.
func DiskID(volumeID string) string {
	sum := sha256.Sum256([]byte(volumeID))
	return "dv" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:10]))
}

// DiskID returns the id of the volume's disk.
func (v Volume) DiskID() string { return DiskID(v.ID) }

// Holder returns the name of the container that holds a volume in the guest while no other
// container uses it.
func Holder(volumeID string) string { return "volume-" + DiskID(volumeID) }
