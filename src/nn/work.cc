#include "nn/work.h"

#include <algorithm>

#include "base/text.h"

namespace kt::inline nn {
namespace {

double seconds(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

}  // namespace

std::string name_of(const Place& place) {
  switch (place.kind) {
    case Place::Kind::kGpu:
      return place.share == 0 ? text("GPU {}", place.index)
                              : text("GPU {} #{}", place.index, place.share + 1);
    case Place::Kind::kLink:
      return text("link {}", place.index);
    case Place::Kind::kNode:
      break;
  }
  return place.index < 0 ? "host" : text("node {}", place.index);
}

Amount& Amount::operator+=(const Amount& other) {
  bytes += other.bytes;
  integer_operations += other.integer_operations;
  float_operations += other.float_operations;
  return *this;
}

Amount& Amount::operator-=(const Amount& other) {
  bytes -= other.bytes;
  integer_operations -= other.integer_operations;
  float_operations -= other.float_operations;
  return *this;
}

Amount& Work::at(const Place& place) {
  const auto found = std::ranges::find(places, place, &At::place);
  return found != places.end() ? found->amount : places.emplace_back(At{place, {}}).amount;
}

Amount Work::total() const {
  Amount sum;
  for (const At& at : places) sum += at.amount;
  return sum;
}

Work& Work::operator+=(const Work& other) {
  for (const At& theirs : other.places) at(theirs.place) += theirs.amount;
  return *this;
}

Work& Work::operator-=(const Work& other) {
  for (const At& theirs : other.places) at(theirs.place) -= theirs.amount;
  return *this;
}

Limit limit_of(const Amount& amount, const Rates& rates) {
  const double reading = seconds(amount.bytes, rates.read_bytes),
               multiplying = seconds(amount.integer_operations, rates.integer_operations) +
                             seconds(amount.float_operations, rates.float_operations);
  return multiplying > reading ? Limit{multiplying, "multiply"} : Limit{reading, "memory"};
}

Limit limit_of(const Work& work, const Rates& host) {
  Amount amount;
  for (const Work::At& at : work.places)
    if (at.place.kind == Place::Kind::kNode) amount += at.amount;
  return limit_of(amount, host);
}

}  // namespace kt::inline nn
