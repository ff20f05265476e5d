//go:build long

package vsock

import "testing"

func TestThousandConnectionsAtOnce(t *testing.T) { connectionsAtOnce(t, 1000) }

func TestTenThousandConnectionsOpenedAndClosedLeaveNothing(t *testing.T) { openedAndClosed(t, 10_000) }

func TestGigabyteEachWayIsIntact(t *testing.T) { bulkEachWay(t, 1024) }

func TestHundredSlowReadersStallOnlyThemselves(t *testing.T) { slowReaders(t, 100) }
