package guestinit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestImageWithoutAListNeedsNoModules(t *testing.T) {
	if err := LoadModules(filepath.Join(t.TempDir(), "modules")); err != nil {
		t.Errorf("want none\ngot  %v", err)
	}
}

func TestModuleThatIsMissingIsNamedAndTheOthersAreTried(t *testing.T) {
	dir := t.TempDir()
	list := filepath.Join(dir, "modules")
	if err := os.WriteFile(list, []byte(dir+"/first.ko\n\n"+dir+"/second.ko\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := LoadModules(list)
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "first.ko") || !strings.Contains(err.Error(), "second.ko") {
		t.Errorf("want both named, as missing\ngot  %v", err)
	}
}

func TestOnlyTheNeededModulesAreLoadedAtOnce(t *testing.T) {
	dir := t.TempDir()
	list := filepath.Join(dir, "modules")
	if err := os.WriteFile(list, []byte(dir+"/first.ko\n"+dir+"/vsock.ko\n"+dir+"/last.ko\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, last := range map[string]string{"vsock": "vsock.ko", "last": "last.ko", "absent": "last.ko", "sock": "last.ko"} {
		others, err := LoadModulesUntil(list, name)
		rest := others()
		for i, module := range []string{"first.ko", "vsock.ko", "last.ko"} {
			now := i < 2 || last == "last.ko"
			if strings.Contains(fmt.Sprint(err), module) != now || strings.Contains(fmt.Sprint(rest), module) == now {
				t.Errorf("until %s: %s\nwant it tried at once: %v\ngot  at once %v, then %v", name, module, now, err, rest)
			}
		}
	}
}
