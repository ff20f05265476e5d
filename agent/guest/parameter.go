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

// hasParameters refuses parameters that a loaded module does not have. given are those that
// it was loaded with, where ours says that this is known. A parameter that neither this nor
// the kernel shows, as one of mode 0 (module_param in include/linux/moduleparam.h), is
// taken for granted.
func hasParameters(folder string, parameters, given []string, ours bool) error {
	for _, p := range parameters {
		name, want, has := strings.Cut(p, "=")
		if name == "" || name != filepath.Base(name) || name == ".." {
			return errkind.New(errkind.InvalidArgument, "%.80q is no parameter", p)
		}
		if slices.Contains(given, p) {
			continue
		}
		if !has {
			want = "1" // a bool may be given by its name alone
		}
		shown, err := os.ReadFile(filepath.Join(folder, "parameters", name))
		switch {
		case errors.Is(err, fs.ErrNotExist) && !ours, errors.Is(err, fs.ErrPermission): // it may be to write only
		case err != nil || !sameValue(strings.TrimSpace(string(shown)), want):
			return errkind.New(errkind.FailedPrecondition, "it is loaded already, and parameter %.80q is not as asked for", p)
		}
	}
	return nil
}

// sameValue reports whether a value that the kernel shows is what was asked for, whichever
// of the parameter types it has (param_get_bool and its like in kernel/params.c): sysfs
// does not say which.
func sameValue(shown, want string) bool {
	if len(want) > 1 && strings.HasPrefix(want, `"`) && strings.HasSuffix(want, `"`) {
		want = want[1 : len(want)-1] // as the kernel takes quotes away
	}
	if shown == want {
		return true
	}
	some, others := strings.Split(shown, ","), strings.Split(want, ",")
	return len(some) == len(others) && slices.EqualFunc(some, others, func(a, b string) bool { return a == b || meaning(a) == meaning(b) && meaning(a) != "" })
}

// meaning is a number or a bool in the one way in which two writings of it are equal; ""
// of other values.
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
