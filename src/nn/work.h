// What steps must at least read from memory and multiply, for comparing their time with the machine's limits.
// Weights count once a step in their format's stored bytes, routed experts only where a token went there.
#pragma once
#include <vector>

#include "nn/place.h"

namespace kt::inline nn {

struct Amount {
  double bytes = 0;
  double integer_operations = 0;  // with weights of integer codes; multiply and add are two
  double float_operations = 0;
  Amount& operator+=(const Amount& other);
  Amount& operator-=(const Amount& other);
};

// By the place that does it.
struct Work {
  struct At {
    Place place;
    Amount amount;
  };
  std::vector<At> places;  // each once

  Amount& at(const Place& place);  // nothing yet, where it did nothing so far
  Amount total() const;
  Work& operator+=(const Work& other);
  Work& operator-=(const Work& other);
};

// What a place can do in a second.
struct Rates {
  double read_bytes = 0, integer_operations = 0, float_operations = 0;
};

// The least time the work can take: the larger of reading and multiplying, as if each ran alone and at its
// best. A rate of zero is unknown and limits nothing.
struct Limit {
  double seconds = 0;
  const char* which = "memory";  // or "multiply"
};
Limit limit_of(const Amount& amount, const Rates& rates);
// Of what the host does: a model of one place.
Limit limit_of(const Work& work, const Rates& host);

}  // namespace kt::inline nn
