// HOLES=0 compiles; every other number is a call whose pattern has another number of holes than there are arguments,
// and does not.
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

std::string exchanged(std::string_view) { return {}; }

void call(int n) {
#if HOLES == 0
  kt::text("{} of {}", n, "four");
  kt::fail("{{}} is no hole");
#elif HOLES == 1
  kt::text("{} of {}", n);
#elif HOLES == 2
  kt::text("none", n);
#elif HOLES == 3
  kt::fail("{}: expected {}", n);
#elif HOLES == 4
  kt::fail_as(kt::ErrorKind::kMemory, "{}: expected {}", n);
#elif HOLES == 5
  KT_CHECK(n > 0, "{} is not above {}", n);
#elif HOLES == 6
  KT_LOG(kt::LogLevel::kInfo, "{} experts");
#elif HOLES == 7
  kt::text(kt::ExchangedPattern{"{} of {}", exchanged}, n);
#endif
}
