package message

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/typespb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// enums maps the names of each enum to their numbers, because reflection does not find them.
var enums = map[reflect.Type]map[string]int32{
	reflect.TypeFor[agentpb.HealthCheckResponse_ServingStatus](): agentpb.HealthCheckResponse_ServingStatus_value,
	reflect.TypeFor[agentpb.VolumeUsage_Unit]():                  agentpb.VolumeUsage_Unit_value,
	reflect.TypeFor[typespb.FSGroupChangePolicy]():               typespb.FSGroupChangePolicy_value,
	reflect.TypeFor[volumepb.Condition_Status]():                 volumepb.Condition_Status_value,
	reflect.TypeFor[volumepb.VolumeEvent_Type]():                 volumepb.VolumeEvent_Type_value,
	reflect.TypeFor[volumepb.FrozenVolume_Consistency]():         volumepb.FrozenVolume_Consistency_value,
	reflect.TypeFor[typespb.IPFamily]():                          typespb.IPFamily_value,
}

// enumNames returns an enum's names in the order of their numbers.
func enumNames(t reflect.Type) []string {
	numbers := enums[t]
	return slices.SortedFunc(maps.Keys(numbers), func(a, b string) int { return cmp.Compare(numbers[a], numbers[b]) })
}

// enumNumber returns the number of a name, regardless of case.
func enumNumber(t reflect.Type, name string) (int32, bool) {
	for known, number := range enums[t] {
		if strings.EqualFold(known, name) {
			return number, true
		}
	}
	return 0, false
}

// enumName returns the name of a value, or its number if it has no name.
func enumName(v reflect.Value) string {
	for name, number := range enums[v.Type()] {
		if int64(number) == v.Int() {
			return name
		}
	}
	return strconv.FormatInt(v.Int(), 10)
}
