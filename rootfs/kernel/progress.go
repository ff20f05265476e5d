package kernel

import (
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"
)

// watch writes a line a second to w until the function it returns is called: what goes on, and how many bytes dir
// holds by now. Work of less than a second stays silent.
func watch(w io.Writer, what, dir string) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				fmt.Fprintf(w, "%s: %.1f MB\n", what, float64(folderBytes(dir))/1e6)
			case <-quit:
				return
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}

// folderBytes adds up the files below dir; those that vanish meanwhile count for nothing.
func folderBytes(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			total += info.Size()
		}
		return nil
	})
	return total
}
