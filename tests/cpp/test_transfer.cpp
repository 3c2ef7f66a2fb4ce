// What the transfers refuse; what they do is in conformance.h.
#include "backends.h"
#include "check.h"
#include "core/error.h"

using namespace mgpu;

int main() {
  unsigned char byte = 0;
  const Streams host{Stream{}};
  CHECK_THROWS(InvalidArgument, "3 rows together",
               (transfer_of(host, {}).scatter({&byte, 1, 2, 1}, {}, {{&byte, 3}}, host), 0));
  CHECK_THROWS(InvalidArgument, "2 parts, 1 streams",
               (transfer_of(host, {}).gather({{&byte, 1}, {&byte, 1}}, host, {&byte, 1, 2, 1}, {}), 0));
  return passed();
}
