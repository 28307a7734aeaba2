#include "server/access.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "server/api_error.h"

namespace kt::inline server {
namespace {

// The status that a request gets; 200: none refused it.
int status_for(const Access& access, HttpHeaders headers) {
  try {
    access.check({.headers = std::move(headers)});
  } catch (const ApiError& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.status();
  }
  return 200;
}

TEST(AccessTest, HostsThatCannotBeMadeToPointElsewhere) {
  const Access access({});
  for (const char* host :
       {"localhost", "localhost:30000", "LOCALHOST", "localhost.", "kt.localhost:80", "127.0.0.1",
        "127.0.0.1:1", "192.168.1.7:30000", "0.0.0.0:30000", "[::1]", "[::1]:30000", "[fe80::1]:8", ""})
    EXPECT_EQ(status_for(access, {{"Host", host}}), 200) << host;
  EXPECT_EQ(status_for(access, {}), 200) << "HTTP/1.0";
}

TEST(AccessTest, OtherHostsAreRefusedWithAndWithoutAnOrigin) {
  const Access access({});
  for (const char* host :
       {"evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", "1.2.3.4.5",
        "a", "127.1", "2130706433", "[::1].evil.example", "[::1", "[evil]", "[::1%lo]", "localhost..",
        "notlocalhost"}) {
    EXPECT_EQ(status_for(access, {{"Host", host}}), 403) << host;
    EXPECT_EQ(status_for(access, {{"Host", host}, {"Origin", std::string("http://") + host}}), 403) << host;
  }
}

TEST(AccessTest, TheMachinesOwnNameAndThoseGiven) {
  char name[256] = {};
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  const Access access({.allow_hosts = {"Models.example", "kt.lan:8080"}});
  for (const std::string& host :
       {std::string(name), std::string("models.EXAMPLE:30000"), std::string("kt.lan")})
    EXPECT_EQ(status_for(access, {{"Host", host}}), 200) << host;
  EXPECT_EQ(status_for(access, {{"Host", "other.example"}}), 403);
  EXPECT_EQ(status_for(access, {{"Host", "x.models.example"}}), 403);
  EXPECT_EQ(status_for(Access({.allow_hosts = {"*"}}), {{"Host", "other.example"}}), 200);
}

TEST(AccessTest, PagesOfOtherOrigins) {
  const Access own({}), given({.allow_origin = "https://ui.example"}), any({.allow_origin = "*"});
  const HttpHeaders page{{"Host", "localhost:30000"}, {"Origin", "http://localhost:30000"}},
      ui{{"Host", "localhost:30000"}, {"Origin", "https://ui.example"}};
  EXPECT_EQ(status_for(own, page), 200);
  EXPECT_EQ(status_for(own, ui), 403);
  EXPECT_EQ(status_for(given, page), 200);
  EXPECT_EQ(status_for(given, ui), 200);
  EXPECT_EQ(status_for(any, ui), 200);
  EXPECT_EQ(status_for(any, {{"Host", "evil.example"}, {"Origin", "http://evil.example"}}), 403);
}

TEST(AccessTest, TheKeyComesFirst) {
  const Access access({.api_keys = {"sesame"}});
  EXPECT_EQ(status_for(access, {{"Host", "evil.example"}}), 401);
  EXPECT_EQ(status_for(access, {{"Host", "evil.example"}, {"Authorization", "Bearer sesame"}}), 403);
  EXPECT_EQ(status_for(access, {{"Host", "localhost"}, {"Authorization", "bearer sesame"}}), 200);
  EXPECT_EQ(status_for(access, {{"Host", "localhost"}, {"Authorization", "Basic eDpzZXNhbWU="}}), 200);
  EXPECT_EQ(status_for(access, {{"Host", "localhost"}, {"x-api-key", "sesame"}}), 200);
  EXPECT_EQ(status_for(access, {{"Host", "localhost"}, {"x-api-key", "sesam"}}), 401);
}

}  // namespace
}  // namespace kt::inline server
