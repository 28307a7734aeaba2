#include "text/yaml.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "base/testing/error_of.h"
#include "base/testing/temp_folder.h"

namespace kt::inline texts {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using namespace testing_files;

struct Case {
  const char* yaml;
  const char* json;
};

void expect_all(std::initializer_list<Case> cases) {
  for (const Case& c : cases) {
    Json got;
    EXPECT_EQ(error_of([&] { got = parse_yaml(c.yaml, "f"); }), "no error") << c.yaml;
    EXPECT_EQ(got.dump(), Json::parse(c.json).dump()) << c.yaml;
    EXPECT_EQ(parse_yaml(to_yaml(got), "again"), got) << to_yaml(got);
  }
}

std::string yaml_error(std::string_view characters, YamlLimits limits = {}) {
  return error_of([&] { parse_yaml(characters, "f.yaml", limits); });
}

struct Refused {
  const char* yaml;
  const char* message;  // what follows "f.yaml:"
};

void expect_refused(std::initializer_list<Refused> cases) {
  for (const Refused& c : cases) {
    const std::string got = yaml_error(c.yaml);
    EXPECT_THAT(got, StartsWith(std::string("f.yaml:") + c.message)) << c.yaml;
    EXPECT_THAT(got, HasSubstr(", expected ")) << c.yaml;
    EXPECT_EQ(got.find('\n'), std::string::npos) << c.yaml;
  }
}

TEST(ReadYaml, PlainScalars) {
  expect_all({
      {"", "null"},
      {"# nothing\n", "null"},
      {"[~, null, Null, NULL, '~', nULL]", R"([null,null,null,null,"~","nULL"])"},
      {"[true, True, TRUE, yes, Yes, on, ON, tRUE, y]", R"([true,true,true,true,true,true,true,"tRUE","y"])"},
      {"[false, False, no, No, NO, off, OFF, n]", R"([false,false,false,false,false,false,false,"n"])"},
      {"[0, -0, 7, -7, +7, 0o17, 0x1f, 0xFF]", "[0,0,7,-7,7,15,31,255]"},
      {"[18446744073709551615, -9223372036854775808]", "[18446744073709551615,-9223372036854775808]"},
      {"[1e-4, 1.0e-4, 1E5, 1e+5, .5, 5., -.5, +1.5, 012.5]", "[1e-4,1e-4,1e5,1e5,0.5,5.0,-0.5,1.5,12.5]"},
      {"[1e, e5, ., +, 1.2.3, 0x, 0o8, 0xg, --5, 1-2]",
       R"(["1e","e5",".","+","1.2.3","0x","0o8","0xg","--5","1-2"])"},
      {"[2001-12-14, 192.168.0.1:8080, 08:30, 22:99, cuda:0, 1.5b]",
       R"(["2001-12-14","192.168.0.1:8080","08:30","22:99","cuda:0","1.5b"])"},
      {"a b  c", R"("a b  c")"},
      {"a#b", R"("a#b")"},
      {"a #b", R"("a")"},
      {"a:b", R"("a:b")"},
      {"-a", R"("-a")"},
      {"?a", R"("?a")"},
      {":a", R"(":a")"},
      {"a, b] {c}", R"("a, b] {c}")"},
      {"~/models", R"("~/models")"},
      {"\xEF\xBB\xBF"
       "a: \xC3\xA9",
       "{\"a\":\"\xC3\xA9\"}"},
  });
}

TEST(ReadYaml, QuotedScalars) {
  expect_all({
      {"''", R"("")"},
      {"'it''s'", R"("it's")"},
      {R"('a\n"#: ')", R"("a\\n\"#: ")"},
      {"'true'", R"("true")"},
      {"\"\"", R"("")"},
      {R"("\0\a\b\t\n\v\f\r\e\ \"\/\\\N\_\L\P")",
       R"("\u0000\u0007\b\t\n\u000b\f\r\u001b \"/\\\u0085\u00a0\u2028\u2029")"},
      {R"("\x41\u00e9\U0001F600\ud83d\ude00")", "\"A\\u00e9\\ud83d\\ude00\\ud83d\\ude00\""},
      {"'a\n  b'", R"("a b")"},
      {"'a  \n\n \t b'", R"("a\nb")"},
      {"\"a \\\n  b\"", R"("a b")"},
      {"\"a\\\n\n  b\"", R"("a\nb")"},
      {"\"a\\t \n  b\"", R"("a\t b")"},
      {"\"a \\ \n b\"", R"("a   b")"},
      {"\"\n a\n\"", R"(" a ")"},
      {"a: 'b\nc'\nd: 1", R"({"a":"b c","d":1})"},
  });
}

TEST(ReadYaml, PlainScalarsOfSeveralLines) {
  expect_all({
      {"a\nb", R"("a b")"},
      {"a\n\n\n  b\nc", R"("a\n\nb c")"},
      {"a: b\n  c\n d\ne: f", R"({"a":"b c d","e":"f"})"},
      {"a:\n  b\n  c", R"({"a":"b c"})"},
      {"- a\n b\n- c", R"(["a b","c"])"},
      {"a: b\n  - c", R"({"a":"b - c"})"},
      {"a: b \t\n  c # d\n", R"({"a":"b c"})"},
      {"[a\n b,\nc]", R"(["a b","c"])"},
      {"a: 1\n  2", R"({"a":"1 2"})"},
  });
}

TEST(ReadYaml, BlockScalars) {
  expect_all({
      {"|\n a\n b\n", R"("a\nb\n")"},
      {"|\na\nb\n", R"("a\nb\n")"},
      {"|-\n a\n\n", R"("a")"},
      {"|+\n a\n\n", R"("a\n\n")"},
      {"|\n a", R"("a")"},
      {"a: |\n  b\n   c\n\n  d # e\nf: g", R"({"a":"b\n c\n\nd # e\n","f":"g"})"},
      {"a: |2\n    b\n", R"({"a":"  b\n"})"},
      {"a: |-2 # note\n    b\n", R"({"a":"  b"})"},
      {"a: |2+\n    b\n\n", R"({"a":"  b\n\n"})"},
      {"a: |\n\n\n  b\n", R"({"a":"\n\nb\n"})"},
      {"a: |\nb: |+\n\n\nc: >-\n", R"({"a":"","b":"\n\n","c":""})"},
      {"a: |\n  \tb\n", R"({"a":"\tb\n"})"},
      {"a: |\n  b\n # done\nc: d", R"({"a":"b\n","c":"d"})"},
      {"- |\n a\n- >\n b\n c\n", R"(["a\n","b c\n"])"},
      {"- a: |\n   b\n  c: d", R"([{"a":"b\n","c":"d"}])"},
      {">\n a\n b\n\n c\n\n\n d\n", R"("a b\nc\n\nd\n")"},
      {">\n a\n  b\n c\n\n  d\n\n e\n", R"("a\n b\nc\n\n d\n\ne\n")"},
      {">-\n\n a\n", R"("\na")"},
      {"--- |\n a\n...\n", R"("a\n")"},
      {"|\na\n...\n", R"("a\n")"},
  });
}

TEST(ReadYaml, BlockCollections) {
  expect_all({
      {"a: 1\nb:\nc: 3", R"({"a":1,"b":null,"c":3})"},
      {"- 1\n-\n- 3", "[1,null,3]"},
      {"a:\n  b:\n    c: 1\n  d: 2\ne: 3", R"({"a":{"b":{"c":1},"d":2},"e":3})"},
      {"a:\n- 1\n- 2\nb: 3", R"({"a":[1,2],"b":3})"},
      {"a:\n  - 1\n  - 2\nb: 3", R"({"a":[1,2],"b":3})"},
      {"- a: 1\n  b: 2\n- c: 3", R"([{"a":1,"b":2},{"c":3}])"},
      {"- a:\n  - 1\n  b:\n    - 2", R"([{"a":[1],"b":[2]}])"},
      {"- - 1\n  - 2\n- - - 3", "[[1,2],[[3]]]"},
      {"-\n  a: 1\n-\n  - 2", R"([{"a":1},[2]])"},
      {"  a: 1\n  b: 2\n", R"({"a":1,"b":2})"},
      {"a : 1\n'b' : 2\n\"c d\": 3", R"({"a":1,"b":2,"c d":3})"},
      {"10: a\ntrue: b\n~: c\n1_0: d", R"({"10":"a","true":"b","~":"c","1_0":"d"})"},
      {"a:\tb\nc: d\t# e\n-x: 1", R"({"a":"b","c":"d","-x":1})"},
      {"# x\n\na: # y\n  # z\n\n  b: 1\n   # w\n  \t\n  c: 2", R"({"a":{"b":1,"c":2}})"},
      {"a: 1\r\nb:\r  - 2\r\n", R"({"a":1,"b":[2]})"},
      {"---\na: 1\n...\n# end\n", R"({"a":1})"},
      {"# first\n--- # here\n- 1\n", "[1]"},
      {"--- text\n", R"("text")"},
      {"---\n", "null"},
      {"a:\n  'b\n   c'\nd: e", R"({"a":"b c","d":"e"})"},
  });
}

TEST(ReadYaml, FlowCollections) {
  expect_all({
      {"[]", "[]"},
      {"{}", "{}"},
      {"a: []\nb: {}", R"({"a":[],"b":{}})"},
      {"[1, 2,]", "[1,2]"},
      {"{a: 1, b, c: , 'd': [x], \"e\":2, f: {g: h},}",
       R"({"a":1,"b":null,"c":null,"d":["x"],"e":2,"f":{"g":"h"}})"},
      {"{a:1, b::c: 2}", R"({"a:1":null,"b::c":2})"},
      {"[a: 1, b]", R"([{"a":1},"b"])"},
      {"a: [\n  1, # one\n  [2,\n  3],\n]\nb: {\n x: 1\n}", R"({"a":[1,[2,3]],"b":{"x":1}})"},
      {"- [a, b]\n- {c: d}\n", R"([["a","b"],{"c":"d"}])"},
      {R"({"a": [1, -2.5e3, "x\u0041\/", null, true]})", R"({"a":[1,-2.5e3,"xA/",null,true]})"},
      {"{a: b,\n\tc: d}", R"({"a":"b","c":"d"})"},
      {"{a\n,b\n}", R"({"a":null,"b":null})"},
      {"[a-b, -c, ?d, :e, f?g]", R"(["a-b","-c","?d",":e","f?g"])"},
  });
}

TEST(ReadYaml, PlacementRules) {
  expect_all(
      {{R"(- match:
    name: "^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$"  # regular expression
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      generate_op: "KLinearMarlin"
- match:
    name: '^model\.layers\..*\.mlp\.experts$'
  replace:
    class: KTransformersExperts
    kwargs: {out_device: "cuda:0", transfer_map: {30: "cuda:1"}}
  recursive: False # leave the subtree
)",
        R"([{"match":{"name":"^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$","class":"torch.nn.Linear"},
 "replace":{"class":"ktransformers.operators.linear.KTransformersLinear",
            "kwargs":{"generate_device":"cuda","generate_op":"KLinearMarlin"}}},
{"match":{"name":"^model\\.layers\\..*\\.mlp\\.experts$"},
 "replace":{"class":"KTransformersExperts","kwargs":{"out_device":"cuda:0","transfer_map":{"30":"cuda:1"}}},
 "recursive":false}])"}});
}

TEST(ReadYaml, RefusesByName) {
  expect_refused({
      {"a: &x 1", "1:4: found \"&\", expected a value: anchors and aliases are not read"},
      {"a: *x", "1:4: found \"*\", expected a value: anchors and aliases are not read"},
      {"&x a: 1", "1:1: found \"&\", expected a value: anchors"},
      {"a: 1\n<<: b", "2:1: found \"<<\", expected a key: merge keys are not read"},
      {"{<<: b}", "1:2: found \"<<\", expected a key: merge keys"},
      {"a: !!str 1", "1:4: found \"!\", expected a value: tags are not read"},
      {"%YAML 1.2\n---\na", "1:1: found \"%\", expected the document: directives are not read"},
      {"a: @b", "1:4: found \"@\", expected a value, which"},
      {"? a\n: b", "1:1: found \"?\", expected a key that is one scalar: complex keys are not read"},
      {"{? a : b}", "1:2: found \"?\", expected a key that is one scalar: complex"},
      {"[a]: b", "1:4: found \":\", expected no \":\" behind a collection: complex keys"},
      {"{[a]: b}", "1:2: found \"[\", expected a key that is one scalar: complex"},
      {"a:\n\tb: 1", "2:1: found a tab in the indentation, expected spaces"},
      {"a:\n  b: 1\n \tc: 2", "3:2: found a tab in the indentation"},
      {"a: 1\nb: 2\na: 3", "3:1: found the key \"a\" a second time, expected each key once"},
      {"- {a: 1, 'a': 3}", "1:10: found the key \"a\" a second time"},
      {"1: a\n'1': b", "2:1: found the key \"1\" a second time"},
      {"a\n---\nb", "2:1: found \"-\", expected the end of the file: only one document"},
      {"---\n---\n", "2:1: found \"-\", expected the end of the file: only one document"},
      {"a\n...\nb", "3:1: found \"b\", expected the end of the document"},
      {"a: .inf", "1:4: found .inf, expected a finite number"},
      {"[-.INF]", "1:2: found -.INF, expected a finite number"},
      {".nan", "1:1: found .nan, expected a finite number"},
      {"a: 1e999", "1:4: found 1e999, expected a number in the range of a double"},
      {"a: 18446744073709551616", "1:4: found 18446744073709551616, expected an integer of at most 64 bits"},
      {"-9223372036854775809", "1:1: found -9223372036854775809, expected an integer"},
      {"a: 010", "1:4: found 010, expected no zero in front"},
      {"a: 1_000", "1:4: found 1_000, expected decimal digits only, or quotes: a number to some"},
      {"a: 1:30", "1:4: found 1:30, expected decimal digits only"},
      {"a: 0b11", "1:4: found 0b11, expected decimal digits only"},
      {"a: -0x1f", "1:4: found -0x1f, expected decimal digits only"},
      {"a: 1_0.5", "1:4: found 1_0.5, expected decimal digits only"},
      {"a: .5_0e+1", "1:4: found .5_0e+1, expected decimal digits only"},
  });
}

TEST(ReadYaml, RefusesWhatIsNotYaml) {
  expect_refused({
      {"a: b: c", "1:5: found \":\", expected one value in this line"},
      {"a: 'b': c", "1:7: found \":\", expected one value in this line"},
      {"a: - b", "1:4: found \"-\", expected the sequence on a line of its own"},
      {"--- a: b", "1:6: found \":\", expected one value in this line"},
      {"-\ta: b", "1:4: found \":\", expected one value in this line"},
      {"a: 1\n  b: 2", "2:4: found \":\", expected more of the text"},
      {"a: 'x'\n  b: 2", "2:3: found \"b\", expected column 1 or less"},
      {"a:\n    b: 1\n  c: 2", "3:3: found \"c\", expected column 1 or less"},
      {"  a: 1\nb: 2", "2:1: found \"b\", expected the end of the document"},
      {"- a\n  - b\n- c: \n  d", "4:4: found the end of the file, expected \": \" behind a key"},
      {"- a\nb: 1", "2:1: found \"b\", expected \"- \" of the next entry"},
      {"a: 1\n- b", "2:1: found \"-\", expected a key"},
      {"a: 1\nb", "2:2: found the end of the file, expected \": \" behind a key"},
      {"a: 1\n[b]: 2", "2:1: found \"[\", expected a key"},
      {"'a\n b': 1", "1:1: found a key of several lines"},
      {"{a\n b: 1}", "1:2: found a key of several lines"},
      {"['a'\n : 1]", "1:2: found a key of several lines"},
      {"[1, 2", "1:6: found the end of the file, expected \",\" or \"]\""},
      {"[1 2}", "1:5: found \"}\", expected \",\" or \"]\""},
      {"{a: 1]", "1:6: found \"]\", expected \",\" or \"}\""},
      {"[,]", "1:2: found \",\", expected a value"},
      {"[a,,b]", "1:4: found \",\", expected a value"},
      {"[- a]", "1:2: found \"-\", expected a value"},
      {"{: a}", "1:2: found \":\", expected a value"},
      {"[a,#b\n]", "1:4: found \"#\", expected a value"},
      {"[a\n---\nb]", "2:1: found \"-\", expected the end of the [ or {"},
      {"]", "1:1: found \"]\", expected a value"},
      {": a", "1:1: found \":\", expected a value"},
      {"'a", "1:1: found a quote that is not closed, expected another '"},
      {"a: \"b", "1:4: found a quote that is not closed, expected another \""},
      {"'a\n---\n'", "2:1: found \"-\", expected the closing quote"},
      {"'a' b", "1:5: found \"b\", expected the end of the line"},
      {"'a'#b", "1:4: found \"#\", expected the end of the line"},
      {"[a] b", "1:5: found \"b\", expected the end of the line"},
      {"\"\\q\"", "1:3: found \"q\", expected an escape that YAML has"},
      {"\"\\x4g\"", "1:5: found \"g\", expected a hexadecimal digit"},
      {"\"\\ud800\"", "1:2: found an escape of half a pair"},
      {"\"\\ud800\\u0041\"", "1:2: found an escape of half a pair"},
      {"\"\\U00110000\"", "1:2: found an escape of half a pair or past 10FFFF"},
      {"a: |x\n  b", "1:5: found \"x\", expected the end of the line"},
      {"a: |10\n  b", "1:6: found \"0\", expected the end of the line"},
      {"a: |\n    \n  b", "3:3: found text less indented than an empty line above"},
      {"a: |\n  b\n c", "3:2: found \"c\", expected column 1 or less"},
      {"a: b\xFF", "1:5: found a byte 255, expected UTF-8"},
      {"\xC3\xA9: \x01", "1:4: found the character of code 1, expected printable text"},
      {"a\xEF\xBF\xBE", "1:2: found the character of code 65534, expected printable text"},
  });
  EXPECT_EQ(yaml_error(std::string_view("a\0b", 3)),
            "f.yaml:1:2: found the character of code 0, expected printable text");
}

TEST(ReadYaml, Limits) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(yaml_error(nested(64)), "no error");
  EXPECT_EQ(yaml_error(nested(65)),
            "f.yaml:1:65: found a collection inside 64 others, expected at most 64 levels");
  EXPECT_THAT(yaml_error(std::string(1000000, '[')), HasSubstr("expected at most 64 levels"));
  std::string dashes;
  for (int i = 0; i < 1000; ++i) dashes += "- ";
  EXPECT_THAT(yaml_error(dashes), HasSubstr("f.yaml:1:129: found a collection inside 64 others"));
  EXPECT_THAT(yaml_error("[[a: 1]]", {.depth = 2}), HasSubstr("inside 2 others"));
  EXPECT_EQ(yaml_error("[1,2,3]", {.bytes = 6}), "f.yaml:1:1: found 7 bytes of YAML, expected at most 6");
  EXPECT_EQ(yaml_error("[1,2,3]", {.values = 3}), "f.yaml:1:6: found value number 4, expected at most 3");
  EXPECT_EQ(yaml_error("- 1\n-\n- 3", {.values = 3}), "f.yaml:3:3: found value number 4, expected at most 3");
  EXPECT_EQ(yaml_error("[1,2,3]", {.values = 4}), "no error");
}

TEST(ReadYaml, LongTokensDoNotFloodTheMessage) {
  const std::string key(1 << 20, 'a');
  EXPECT_LT(yaml_error(key + ": 1\n" + key + ": 2").size(), 400u);
  EXPECT_LT(yaml_error("1" + std::string(1 << 20, '0')).size(), 400u);
  EXPECT_LT(yaml_error("'" + key).size(), 400u);
}

TEST(ReadYaml, Files) {
  const TempFolder folder;
  EXPECT_EQ(read_yaml(folder.put("a.yaml", "a: 1"))["a"], 1);
  EXPECT_EQ(read_yaml(folder.put("empty.yaml", "")), Json());
  EXPECT_THAT(error_of([&] { read_yaml(folder.at("none.yaml")); }), HasSubstr("none.yaml: cannot open"));
  EXPECT_THAT(error_of([&] { read_yaml(folder.put("b.yaml", "a: [")); }),
              HasSubstr("b.yaml:1:5: found the end"));
}

TEST(WriteYaml, Layout) {
  EXPECT_EQ(
      to_yaml(Json::parse(R"({"a":1,"b":[1,[2,3],{"c":null,"d":{}}],"e":{"f":true,"g":[]},"h":"x y"})")),
      "a: 1\n"
      "b:\n"
      "  - 1\n"
      "  - - 2\n"
      "    - 3\n"
      "  - c: null\n"
      "    d: {}\n"
      "e:\n"
      "  f: true\n"
      "  g: []\n"
      "h: x y\n");
  EXPECT_EQ(to_yaml(Json("^a\\.b$")), "'^a\\.b$'\n");
  EXPECT_EQ(to_yaml(Json("it's \"")), "'it''s \"'\n");
  EXPECT_EQ(to_yaml(Json("a\n\xE2\x80\xA8\"")), "\"a\\n\\u2028\\\"\"\n");
  EXPECT_EQ(to_yaml(Json(1e-5)), "1.0e-05\n");
  EXPECT_EQ(to_yaml(Json(1e22)), "1.0e+22\n");
  EXPECT_EQ(to_yaml(Json("/data/models:v1.5")), "/data/models:v1.5\n");
}

TEST(WriteYaml, TextThatLooksLikeSomethingElseIsQuoted) {
  for (const char* s : {"",
                        "~",
                        "null",
                        "yes",
                        "NO",
                        "true",
                        "1",
                        "-1.5",
                        "1e5",
                        "0x1F",
                        "010",
                        "1_000",
                        "1:30",
                        "2001-12-14",
                        ".inf",
                        ".nan",
                        "<<",
                        "=",
                        "y",
                        "n",
                        "a: b",
                        "a #b",
                        "#a",
                        " a",
                        "a ",
                        "- a",
                        "-",
                        "?",
                        ":",
                        "a:",
                        "[a]",
                        "{a}",
                        "*a",
                        "&a",
                        "!a",
                        "|",
                        ">",
                        "%a",
                        "@a",
                        "`a`",
                        "'",
                        "\"",
                        "\\",
                        "---",
                        "...",
                        "a\nb",
                        "\t",
                        "\r",
                        "\x7f",
                        "\xC2\x85",
                        "\xEF\xBB\xBF",
                        "\xEF\xBF\xBF",
                        "\xF0\x9F\x98\x80",
                        "a,b",
                        "a  b"}) {
    const Json value = {s, {{s, s}}};
    EXPECT_EQ(parse_yaml(to_yaml(value), "f"), value) << to_yaml(value);
    EXPECT_TRUE(to_yaml(Json(s)).find_first_of("'\"") == 0) << s;
  }
  const std::string zero("a\0b", 3);
  EXPECT_EQ(parse_yaml(to_yaml(Json(zero)), "f"), Json(zero));
}

TEST(WriteYaml, NumbersComeBackExactly) {
  for (const double d :
       {0.0, -0.0, 1.0, 0.1, 1.0 / 3, 1e-300, 5e-324, 1.7976931348623157e308, 123456789012345680.0}) {
    const Json back = parse_yaml(to_yaml(Json(d)), "f");
    ASSERT_TRUE(back.is_number_float()) << d;
    EXPECT_EQ(back.get<double>(), d);
    EXPECT_EQ(std::signbit(back.get<double>()), std::signbit(d));
  }
  for (const Json& v :
       {Json(std::numeric_limits<uint64_t>::max()), Json(std::numeric_limits<int64_t>::min())})
    EXPECT_EQ(parse_yaml(to_yaml(v), "f"), v);
}

TEST(WriteYaml, RefusesWhatYamlHereCannotHold) {
  EXPECT_THAT(error_of([] { to_yaml(Json(INFINITY)); }), HasSubstr("expected a finite one"));
  EXPECT_THAT(error_of([] { to_yaml(Json(NAN)); }), HasSubstr("expected a finite one"));
  EXPECT_THAT(error_of([] { to_yaml(Json("\xFF")); }), HasSubstr("expected UTF-8"));
  EXPECT_THAT(error_of([] { to_yaml(Json::binary({1})); }), HasSubstr("type binary"));
}

// Depth first: "line key" of each value.
void list_lines(const YamlLines& lines, std::string& out) {
  out += text("{}{} ", lines.line, lines.key);
  for (const YamlLines& part : lines.parts) list_lines(part, out);
}

std::string lines_of(std::string_view characters) {
  YamlLines lines;
  std::string out, error;
  try {
    parse_yaml(characters, "t", {}, &lines);
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  list_lines(lines, out);
  return out + error;
}

TEST(Yaml, LinesOfValues) {
  EXPECT_EQ(lines_of(""), "1 ");
  EXPECT_EQ(lines_of("# x\n\n- a: 1\n  b:\n\n    c: |\n     2\n     3\n    d: 4\n-\n  - 5\n"),
            "3 3 3a 4b 6c 9d 10 11 ");
  EXPECT_EQ(lines_of("a: [1,\n 2, {b:\n 3,\n c}, d: 4]\r\ne:\r\nf: 'x\n\n y'\ng: z\n"),
            "1 1a 1 2 2 2b 4c 4 4d 5e 6f 9g ");
  // What stood before a fault is known.
  EXPECT_EQ(lines_of("- a: 1\n- b: 2\n- c: &x\n"),
            "1 1 1a 2 2b 3 3c t:3:6: found \"&\", expected a value: anchors and aliases are not read");
  YamlLines lines;
  parse_yaml("a: 1\nb: 2\n", "t", {}, &lines);
  EXPECT_EQ(lines.of("b").line, 2);
  EXPECT_EQ(lines.of("c").line, 1);
}

}  // namespace
}  // namespace kt::inline texts
