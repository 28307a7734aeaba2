#include "server/page.h"

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "server/page_files.h"

namespace kt::inline server {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string source_of(std::string_view name) {
  std::ifstream file(std::string(KT_PAGE_FOLDER "/") + std::string(name), std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

TEST(Page, HoldsTheFilesByteForByte) {
  EXPECT_GE(page_files().size(), 5u);
  for (const EmbeddedFile& file : page_files()) EXPECT_EQ(file.bytes, source_of(file.name)) << file.name;
}

TEST(Page, IsSmall) {
  size_t total = 0;
  for (const EmbeddedFile& file : page_files()) total += file.bytes.size();
  EXPECT_LT(total, 120'000u);
}

TEST(Page, TypesAndHeaders) {
  const std::pair<const char*, const char*> types[] = {{"/", "text/html; charset=utf-8"},
                                                       {"/page.css", "text/css; charset=utf-8"},
                                                       {"/page.js", "text/javascript; charset=utf-8"},
                                                       {"/icon.svg", "image/svg+xml"},
                                                       {"/favicon.ico", "image/svg+xml"}};
  for (const auto& [path, type] : types) {
    const auto reply = page_reply(path);
    ASSERT_TRUE(reply) << path;
    EXPECT_EQ(reply->status, 200);
    EXPECT_EQ(reply->type, type) << path;
    EXPECT_FALSE(reply->body.empty()) << path;
    EXPECT_EQ(find_header(reply->headers, "cache-control"), "no-cache");
    EXPECT_EQ(find_header(reply->headers, "x-content-type-options"), "nosniff");
    EXPECT_EQ(find_header(reply->headers, "referrer-policy"), "no-referrer");
    const std::string policy(find_header(reply->headers, "content-security-policy").value_or(""));
    EXPECT_THAT(policy, HasSubstr("default-src 'none'; script-src 'self'; style-src 'self'"));
    EXPECT_THAT(policy, Not(HasSubstr("unsafe"))) << "the policy must forbid what is inline";
  }
}

TEST(Page, OtherPathsAreNotItsBusiness) {
  for (const char* path : {"", "//", "/v1/models", "/health", "/page", "/page.css/", "/../page.css",
                           "/PAGE.CSS", "page.css", "/index.htm", "/kt/status"}) {
    EXPECT_FALSE(page_reply(path)) << path;
  }
}

// What the policy forbids, and what would let a model's text become markup, is not even written down.
TEST(Page, NothingInlineNothingForeign) {
  const std::string html = page_reply("/")->body;
  EXPECT_THAT(html, Not(HasSubstr("style=\"")));
  EXPECT_THAT(html, Not(HasSubstr("<style")));
  EXPECT_THAT(html, Not(HasSubstr("<script>")));
  EXPECT_THAT(html, Not(HasSubstr("onclick")));
  for (const EmbeddedFile& file : page_files()) {
    const std::string text(file.bytes);
    for (const char* word : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                             "new Function", "DOMParser", "@import", "url("}) {
      EXPECT_THAT(text, Not(HasSubstr(word))) << file.name;
    }
    if (file.name.ends_with(".js")) continue;
    for (size_t at = text.find("//"); at != text.npos; at = text.find("//", at + 1)) {
      EXPECT_TRUE(text.substr(at).starts_with("//www.w3.org/2000/svg"))
          << file.name << ": " << text.substr(at, 40);
    }
  }
}

TEST(Page, AddressesAreRelative) {
  for (const EmbeddedFile& file : page_files()) {
    for (const char* word : {"href=\"/", "src=\"/", "fetch('/", "'/v1", "'/kt", "'/health", "from '/"}) {
      EXPECT_THAT(std::string(file.bytes), Not(HasSubstr(word))) << file.name;
    }
  }
}

}  // namespace
}  // namespace kt::inline server
