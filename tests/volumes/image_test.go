package volumes

import (
	"bytes"
	"os"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/directvol/directvol/tests/vm"
)

// tests/guest obeys everybody who connects, so the shipped image must not contain it.
func TestShippedImageDoesNotHoldTheTestsProgram(t *testing.T) {
	build, err := vm.FindBuild()
	must(t, err)
	shipped, tested := programs(t, build.Image), programs(t, build.TestImage)
	if _, ok := tested["test-guest"]; !ok {
		t.Fatal("the image for tests holds no test-guest: this test no longer knows its name")
	}
	if _, ok := shipped["test-guest"]; ok {
		t.Error("the shipped image has test-guest, which obeys every client")
	}
	delete(tested, "test-guest")
	if len(shipped) != len(tested) {
		t.Errorf("files\nwant those of the shipped image, %d\ngot  %d", len(shipped), len(tested))
	}
	for name, content := range shipped {
		if !bytes.Equal(content, tested[name]) {
			t.Errorf("%s differs from what is tested", name)
		}
	}
}

// programs returns the files of an image.
func programs(t *testing.T, image string) map[string][]byte {
	t.Helper()
	file, err := os.Open(image)
	must(t, err)
	defer file.Close()
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(file))
	must(t, err)
	files := map[string][]byte{}
	for _, r := range records {
		if r.Mode&cpio.S_IFMT != cpio.S_IFREG {
			continue
		}
		content := make([]byte, r.FileSize)
		_, err := r.ReadAt(content, 0)
		must(t, err)
		files[r.Name] = content
	}
	return files
}
