package holders

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestReadersHaveTimeToEnd(t *testing.T) {
	reader, writer := Found{Holders: []Holder{{reads: true}}}, Found{Holders: []Holder{{reads: true}, {}}}
	for name, test := range map[string]struct {
		block bool
		found []Found // by each search; the last one is found again and again
		want  time.Duration
	}{
		"nobody has it":                  {true, []Found{{}}, 0},
		"a writer":                       {true, []Found{writer}, 0},
		"a reader of a file":             {false, []Found{reader}, 0},
		"a reader that ends":             {true, []Found{reader, reader, reader, {}}, 3 * lookAgain},
		"a reader that stays":            {true, []Found{reader}, settleLimit},
		"a writer that follows a reader": {true, []Found{reader, writer}, lookAgain},
	} {
		synctest.Test(t, func(t *testing.T) {
			began, all := time.Now(), slices.Clone(test.found)
			found, err := settled(t.Context(), test.block, func() (Found, error) {
				now := all[0]
				all = all[min(1, len(all)-1):]
				return now, nil
			})
			last := test.found[len(test.found)-1]
			if err != nil || len(found.Holders) != len(last.Holders) || time.Since(began) != test.want {
				t.Errorf("%s\nwant %d holders after %v\ngot  %d after %v, error %v", name, len(last.Holders), test.want, len(found.Holders), time.Since(began), err)
			}
		})
	}
}
