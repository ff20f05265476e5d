package sandbox

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
)

// maxVolumeID is how many bytes a volume's id has at most, as CSI has it.
const maxVolumeID = 128

// checkID refuses what is no volume id: anything else is one, paths among it.
func checkID(id string) error {
	if id == "" || len(id) > maxVolumeID {
		return also(ErrInfeasible, fmt.Errorf("volume id %.140q: want 1 to %d bytes, got %d", id, maxVolumeID, len(id)))
	}
	return nil
}

// DiskID returns the id of a volume's disk: 18 letters and digits that follow from the
// volume's id alone, so that who has lost everything else finds the disk by it. It is
// the serial that the guest sees, of which virtio has room for 20 bytes.
func DiskID(volumeID string) string {
	sum := sha256.Sum256([]byte(volumeID))
	return "dv" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:10]))
}

// DiskID is that of the volume's ID.
func (v Volume) DiskID() string { return DiskID(v.ID) }

// Holder is the container that holds a volume in the guest for as long as no container
// of its own does.
func Holder(volumeID string) string { return "volume-" + DiskID(volumeID) }
