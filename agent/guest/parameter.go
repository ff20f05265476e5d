package guest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/directvol/directvol/agent/errkind"
)

// hasParameters refuses parameters that a loaded module does not have. given are the parameters
// with which it was loaded, known only if ours is set. A parameter that is neither in given nor
// shown by the kernel, such as one of mode 0 (module_param in include/linux/moduleparam.h), is
// assumed to be set as requested.
func hasParameters(folder string, parameters, given []string, ours bool) error {
	for _, p := range parameters {
		name, want, has := strings.Cut(p, "=")
		if name == "" || name != filepath.Base(name) || name == ".." {
			return errkind.New(errkind.InvalidArgument, "%.80q is not a parameter", p)
		}
		if slices.Contains(given, p) {
			continue
		}
		if !has {
			want = "1" // a bool may be given by its name alone
		}
		shown, err := os.ReadFile(filepath.Join(folder, "parameters", name))
		switch {
		case errors.Is(err, fs.ErrNotExist) && !ours, errors.Is(err, fs.ErrPermission): // it may be write-only
		case err != nil || !sameValue(strings.TrimSpace(string(shown)), want):
			return errkind.New(errkind.FailedPrecondition, "it is loaded already, but without the requested parameter %.80q", p)
		}
	}
	return nil
}

// sameValue reports whether a value that the kernel shows equals the requested one under any of the
// parameter types (param_get_bool and similar functions in kernel/params.c), because sysfs does not
// show the type.
func sameValue(shown, want string) bool {
	if len(want) > 1 && strings.HasPrefix(want, `"`) && strings.HasSuffix(want, `"`) {
		want = want[1 : len(want)-1] // as the kernel removes quotes
	}
	if shown == want {
		return true
	}
	some, others := strings.Split(shown, ","), strings.Split(want, ",")
	return len(some) == len(others) && slices.EqualFunc(some, others, func(a, b string) bool { return a == b || meaning(a) == meaning(b) && meaning(a) != "" })
}

// meaning returns a number or a bool in a canonical form, or "" for other values.
func meaning(value string) string {
	if n, err := strconv.ParseInt(value, 0, 64); err == nil {
		return strconv.FormatInt(n, 10)
	}
	if n, err := strconv.ParseUint(value, 0, 64); err == nil {
		return strconv.FormatUint(n, 10)
	}
	switch strings.ToLower(value) { // kstrtobool in lib/kstrtox.c
	case "y", "yes", "t", "true", "on":
		return "1"
	case "n", "no", "f", "false", "off":
		return "0"
	}
	return ""
}
