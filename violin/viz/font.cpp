#include "violin/viz/font.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <numbers>
#include <string>
#include <utility>

namespace violin::viz {
namespace {

// Letters are drawn on a raster of 20 units per em: baseline 0, x-height 10, capitals 14, descenders -4, y up.
//   Mx,y      lift the pen, go there        Lx,y   draw a line there
//   Acx,cy,rx,ry,from,to   draw on along an arc of an ellipse, angles in degrees counter-clockwise from the right
//   Ocx,cy,rx,ry,from,to   the same after lifting the pen
constexpr double kUnitsPerEm = 20;
constexpr double kSideBearing = 3.4;  // between two letters

struct Letter {
  char32_t code;
  double width;
  const char* path;
};

constexpr Letter kLetters[] = {
    {U' ', 2.6, ""},
    {U'!', 0, "M0,14 L0,4.6 M0,0.2 L0,0"},
    {U'"', 3.4, "M0,14 L0,10.4 M3.4,14 L3.4,10.4"},
    {U'#', 9.6, "M3.4,14 L1.6,0 M8,14 L6.2,0 M0.6,9.8 L9.6,9.8 M0,4.4 L9,4.4"},
    {U'$', 9, "O4.6,10.3,4,2.9,35,270 A4.6,3.7,4.4,3.7,90,-145 M4.6,15.6 L4.6,-2"},
    {U'%', 12, "O2.6,11,2.6,3,0,360 O9.4,3,2.6,3,0,360 M9.8,14 L2.2,0"},
    {U'&', 10.4, "M10.2,0 L2.6,9 A4.6,11.2,2.8,2.8,220,-40 L2.2,7 A4.2,3.8,4.2,3.8,130,300 A3.6,6.6,6.6,6.6,-60,0"},
    {U'\'', 0, "M0,14 L0,10.4"},
    {U'(', 3.4, "O8,6,8,10,128,232"},
    {U')', 3.4, "O-4.6,6,8,10,52,-52"},
    {U'*', 7, "M3.5,14 L3.5,7 M0.4,12.2 L6.6,8.8 M0.4,8.8 L6.6,12.2"},
    {U'+', 8.4, "M4.2,11 L4.2,2.6 M0,6.8 L8.4,6.8"},
    {U',', 0.8, "M0.8,0.4 L0,-2.8"},
    {U'-', 4.6, "M0,5.6 L4.6,5.6"},
    {U'.', 0.4, "O0.2,0.3,0.25,0.25,0,360"},
    {U'/', 6, "M0,-1.4 L6,14.6"},
    {U'0', 8.4, "O4.2,7,4.2,7,0,360"},
    {U'1', 8.4, "M1.4,11.2 L4.8,14 L4.8,0"},
    {U'2', 8.4, "O4.1,9.9,3.9,4.1,165,-38 L0.2,0 L8.3,0"},
    {U'3', 8.4, "O4,10.5,3.6,3.5,150,-90 A4,3.5,4.2,3.5,90,-152"},
    {U'4', 8.4, "M6.3,0 L6.3,14 L0,4 L8.6,4"},
    {U'5', 8.4, "M7.6,14 L1.3,14 L0.8,7.6 A4,4.6,4.3,4.6,138,-150"},
    {U'6', 8.4, "O4.2,4.5,4.2,4.5,0,360 O8.2,4.6,8.2,9.4,180,102"},
    {U'7', 8.4, "M0,14 L8.2,14 L2.8,0"},
    {U'8', 8.4, "O4.2,10.6,3.5,3.4,0,360 O4.2,3.6,4.2,3.6,0,360"},
    {U'9', 8.4, "O4.2,9.5,4.2,4.5,0,360 O0.2,9.4,8.2,9.4,0,-78"},
    {U':', 0, "M0,8.4 L0,8.2 M0,0.2 L0,0"},
    {U';', 0.8, "M0.8,8.4 L0.8,8.2 M0.8,0.4 L0,-2.8"},
    {U'<', 7.6, "M7.6,11 L0,6.6 L7.6,2.2"},
    {U'=', 8.4, "M0,8.8 L8.4,8.8 M0,4.6 L8.4,4.6"},
    {U'>', 7.6, "M0,11 L7.6,6.6 L0,2.2"},
    {U'?', 7.4, "O3.7,10.4,3.7,3.6,165,-50 A5.4,5.4,2,2.4,120,180 L3.4,4.4 M3.4,0.2 L3.4,0"},
    {U'@', 13, "O6.5,5.8,2.8,3.2,0,360 M9.3,9 L9.3,4.4 A11.1,4.4,1.8,2,180,360 L12.9,6 A6.5,6,6.4,7.4,0,300"},
    {U'A', 10, "M0,0 L5,14 L10,0 M1.7,4.8 L8.3,4.8"},
    {U'B', 9, "M0,7.2 L5,7.2 A5,3.6,4,3.6,90,-90 L0,0 L0,14 L4.8,14 A4.8,10.6,3.5,3.4,90,-90"},
    {U'C', 9.8, "O5.6,7,5.6,7,48,312"},
    {U'D', 10, "M0,0 L0,14 L3.6,14 A3.6,7,6.4,7,90,-90 L0,0"},
    {U'E', 7.8, "M7.8,14 L0,14 L0,0 L7.8,0 M0,7.2 L6.6,7.2"},
    {U'F', 7.6, "M7.6,14 L0,14 L0,0 M0,7 L6.4,7"},
    {U'G', 10.4, "O5.6,7,5.6,7,48,322 L10,6.6 L6.2,6.6"},
    {U'H', 9.8, "M0,0 L0,14 M9.8,0 L9.8,14 M0,7.2 L9.8,7.2"},
    {U'I', 0, "M0,0 L0,14"},
    {U'J', 6, "M6,14 L6,3.6 A3,3.6,3,3.6,0,-165"},
    {U'K', 9, "M0,0 L0,14 M8.8,14 L0,5.2 M3.2,8.4 L9.2,0"},
    {U'L', 7.2, "M0,14 L0,0 L7.2,0"},
    {U'M', 11.4, "M0,0 L0,14 L5.7,4.4 L11.4,14 L11.4,0"},
    {U'N', 9.8, "M0,0 L0,14 L9.8,0 L9.8,14"},
    {U'O', 11.4, "O5.7,7,5.7,7,0,360"},
    {U'P', 8.8, "M0,0 L0,14 L4.8,14 A4.8,10.1,4,3.9,90,-90 L0,6.2"},
    {U'Q', 11.4, "O5.7,7,5.7,7,0,360 M7.2,3.4 L11.2,-0.8"},
    {U'R', 9.2, "M0,0 L0,14 L4.8,14 A4.8,10.1,4,3.9,90,-90 L0,6.2 M4.8,6.2 L9.2,0"},
    {U'S', 9, "O4.6,10.5,4,3.5,35,270 A4.6,3.5,4.4,3.5,90,-145"},
    {U'T', 9.6, "M0,14 L9.6,14 M4.8,14 L4.8,0"},
    {U'U', 9.6, "M0,14 L0,4.8 A4.8,4.8,4.8,4.8,180,360 L9.6,14"},
    {U'V', 10, "M0,14 L5,0 L10,14"},
    {U'W', 14.4, "M0,14 L3.7,0 L7.2,12.6 L10.7,0 L14.4,14"},
    {U'X', 9.4, "M0,0 L9.2,14 M0.2,14 L9.4,0"},
    {U'Y', 9.6, "M0,14 L4.8,6.6 L9.6,14 M4.8,6.6 L4.8,0"},
    {U'Z', 9.2, "M0.3,14 L9,14 L0,0 L9.2,0"},
    {U'[', 3, "M3,15.4 L0,15.4 L0,-3.4 L3,-3.4"},
    {U'\\', 6, "M0,14.6 L6,-1.4"},
    {U']', 3, "M0,15.4 L3,15.4 L3,-3.4 L0,-3.4"},
    {U'^', 7.6, "M0,8.4 L3.8,14 L7.6,8.4"},
    {U'_', 8.4, "M0,-2 L8.4,-2"},
    {U'`', 2.4, "M0,14 L2.4,11.4"},
    {U'a', 8.4, "O4.2,5,4.2,5,0,360 M8.4,10 L8.4,0"},
    {U'b', 8.4, "O4.2,5,4.2,5,0,360 M0,14.6 L0,0"},
    {U'c', 7.6, "O4.4,5,4.4,5,48,312"},
    {U'd', 8.4, "O4.2,5,4.2,5,0,360 M8.4,14.6 L8.4,0"},
    {U'e', 8.6, "M0.2,5.2 L8.6,5.2 A4.3,5,4.3,5,2,316"},
    {U'f', 5, "M1.8,0 L1.8,11.2 A4.7,11.2,2.9,3.4,180,82 M0,9.6 L4.9,9.6"},
    {U'g', 8.4, "O4.2,5,4.2,5,0,360 M8.4,10 L8.4,-0.4 A4.3,-0.4,4.1,3.8,0,-150"},
    {U'h', 7.8, "M0,0 L0,14.6 M0,5.9 A3.9,5.9,3.9,4.1,180,0 L7.8,0"},
    {U'i', 0, "M0,0 L0,10 M0,13.6 L0,13.8"},
    {U'j', 1.6, "M1.6,10 L1.6,-1.6 A-0.6,-1.6,2.2,2.4,0,-95 M1.6,13.6 L1.6,13.8"},
    {U'k', 7.6, "M0,0 L0,14.6 M7.2,10 L0,3.6 M2.8,6.1 L7.6,0"},
    {U'l', 0, "M0,14.6 L0,0"},
    {U'm', 13, "M0,0 L0,10 M0,6.5 A3.25,6.5,3.25,3.5,180,0 L6.5,0 M6.5,6.5 A9.75,6.5,3.25,3.5,180,0 L13,0"},
    {U'n', 7.8, "M0,0 L0,10 M0,5.9 A3.9,5.9,3.9,4.1,180,0 L7.8,0"},
    {U'o', 8.8, "O4.4,5,4.4,5,0,360"},
    {U'p', 8.4, "O4.2,5,4.2,5,0,360 M0,10 L0,-4.2"},
    {U'q', 8.4, "O4.2,5,4.2,5,0,360 M8.4,10 L8.4,-4.2"},
    {U'r', 4.8, "M0,0 L0,10 M0,5.4 A3.9,5.4,3.9,4.6,180,78"},
    {U's', 6.8, "O3.5,7.4,3.1,2.6,35,270 A3.5,2.4,3.3,2.4,90,-148"},
    {U't', 5, "M1.8,13 L1.8,2.9 A4.4,2.9,2.6,2.9,180,282 M0,9.8 L4.9,9.8"},
    {U'u', 7.8, "M0,10 L0,4.1 A3.9,4.1,3.9,4.1,180,360 M7.8,10 L7.8,0"},
    {U'v', 8, "M0,10 L4,0 L8,10"},
    {U'w', 11.8, "M0,10 L3,0 L5.9,9 L8.8,0 L11.8,10"},
    {U'x', 7.4, "M0,0 L7.2,10 M0.2,10 L7.4,0"},
    {U'y', 8, "M0,10 L4,0.2 M8,10 L2.5,-4.2"},
    {U'z', 7, "M0.2,10 L6.8,10 L0,0 L7,0"},
    {U'{', 4,
     "M4,15.4 A3.6,13.6,1.8,1.8,90,180 L1.8,8 A0,8,1.8,2,0,-90 A0,4,1.8,2,90,0 L1.8,-1.6 A3.6,-1.6,1.8,1.8,180,270"},
    {U'|', 0, "M0,15.4 L0,-3.4"},
    {U'}', 4,
     "M0,15.4 A0.4,13.6,1.8,1.8,90,0 L2.2,8 A4,8,1.8,2,180,270 A4,4,1.8,2,90,180 L2.2,-1.6 A0.4,-1.6,1.8,1.8,0,-90"},
    {U'~', 8.4, "O2.2,6,2.2,1.8,180,30 L4.9,5.6 A6.3,7,2.1,1.8,220,360"},
    {U'·', 0, "M0,6.2 L0,6"},
    {U'×', 6.8, "M0,3.2 L6.8,10 M0,10 L6.8,3.2"},
    {U'γ', 8, "M0,10 L4,0.6 M8,10 L4,0.6 A4,-2,1.5,2.2,80,-260"},
    {U'–', 7.4, "M0,5.6 L7.4,5.6"},
    {U'→', 11, "M0,6 L11,6 M7.4,9.6 L11,6 L7.4,2.4"},
};

constexpr Letter kUnknown = {0, 8, "M0,0 L0,14 L8,14 L8,0 L0,0"};

struct Glyph {
  double width = 0;
  std::vector<std::vector<Point>> strokes;  // in ems, y down
};

Glyph make_glyph(const Letter& letter) {
  Glyph glyph{.width = letter.width / kUnitsPerEm, .strokes = {}};
  const char* at = letter.path;
  const auto next = [&at] {
    char* end = nullptr;
    const double value = std::strtod(at, &end);
    at = *end == ',' ? end + 1 : end;
    return value;
  };
  const auto draw_to = [&glyph](double x, double y) {
    glyph.strokes.back().push_back({x / kUnitsPerEm, -y / kUnitsPerEm});
  };
  while (*at != 0) {
    const char command = *at++;
    if (command == ' ') continue;
    if (command == 'M' || command == 'O') glyph.strokes.emplace_back();
    const double x = next();
    const double y = next();
    if (command == 'M' || command == 'L') {
      draw_to(x, y);
      continue;
    }
    const double rx = next();
    const double ry = next();
    const double from = next();
    const double to = next();
    const int steps = std::max(4, static_cast<int>(std::abs(to - from) / 10));
    for (int i = 0; i <= steps; ++i) {
      const double angle = (from + (to - from) * i / steps) * std::numbers::pi / 180;
      draw_to(x + rx * std::cos(angle), y + ry * std::sin(angle));
    }
  }
  return glyph;
}

const Glyph& glyph_of(char32_t code) {
  static const std::map<char32_t, Glyph> glyphs = [] {
    std::map<char32_t, Glyph> all;
    for (const Letter& letter : kLetters) all.emplace(letter.code, make_glyph(letter));
    return all;
  }();
  static const Glyph unknown = make_glyph(kUnknown);
  const auto found = glyphs.find(code);
  return found == glyphs.end() ? unknown : found->second;
}

// Malformed UTF-8 gives the replacement character, byte by byte.
char32_t next_code(std::string_view& text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t head = byte(0);
  const std::size_t extra = head < 0x80 ? 0 : head >> 5 == 6 ? 1 : head >> 4 == 14 ? 2 : head >> 3 == 30 ? 3 : 4;
  char32_t code = extra == 0 ? head : head & (0x3FU >> extra);
  bool good = extra < 4 && extra < text.size();
  for (std::size_t i = 1; good && i <= extra; ++i) {
    good = byte(i) >> 6 == 2;
    code = code << 6 | (byte(i) & 0x3FU);
  }
  text.remove_prefix(good ? extra + 1 : 1);
  return good ? code : U'\uFFFD';
}

}  // namespace

std::vector<std::vector<Point>> text_strokes(std::string_view text, double size) {
  std::vector<std::vector<Point>> strokes;
  double x = 0;
  while (!text.empty()) {
    const Glyph& glyph = glyph_of(next_code(text));
    for (const std::vector<Point>& stroke : glyph.strokes) {
      std::vector<Point>& placed = strokes.emplace_back();
      for (const Point& point : stroke) placed.push_back({(x + point.x) * size, point.y * size});
    }
    x += glyph.width + kSideBearing / kUnitsPerEm;
  }
  return strokes;
}

double text_width(std::string_view text, double size) {
  double x = 0;
  while (!text.empty()) x += glyph_of(next_code(text)).width + kSideBearing / kUnitsPerEm;
  return x == 0 ? 0 : (x - kSideBearing / kUnitsPerEm) * size;
}

}  // namespace violin::viz
