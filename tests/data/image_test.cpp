#include "violin/data/image.h"

#include <gtest/gtest.h>
#include <png.h>

// clang-format off: jpeglib.h needs FILE
#include <cstdio>
#include <jpeglib.h>
// clang-format on
#ifdef VIOLIN_HAVE_WEBP
#include <webp/encode.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>

#include "tests/temporary_folder.h"
#include "violin/error.h"

namespace violin {
namespace {

Image noise(std::int64_t width, std::int64_t height, unsigned seed) {
  std::mt19937 random(seed);
  Image image(width, height);
  for (std::uint8_t& value : image.pixels) value = static_cast<std::uint8_t>(random());
  return image;
}

// A smooth picture, which JPEG keeps well, different in all four corners.
Image gradient(std::int64_t width, std::int64_t height) {
  Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      std::uint8_t* pixel = image.at(x, y);
      pixel[0] = static_cast<std::uint8_t>(x * 255 / std::max<std::int64_t>(width - 1, 1));
      pixel[1] = static_cast<std::uint8_t>(y * 255 / std::max<std::int64_t>(height - 1, 1));
      pixel[2] = 90;
    }
  }
  return image;
}

int largest_difference(const Image& a, const Image& b) {
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.height, b.height);
  if (a.pixels.size() != b.pixels.size()) return 256;
  int largest = 0;
  for (std::size_t i = 0; i < a.pixels.size(); ++i) largest = std::max(largest, std::abs(a.pixels[i] - b.pixels[i]));
  return largest;
}

// A TIFF block whose only entry is the orientation.
Bytes exif(int orientation, bool little_endian) {
  const auto o = static_cast<std::uint8_t>(orientation);
  if (little_endian) return {'I', 'I', 42, 0, 8, 0, 0, 0, 1, 0, 0x12, 1, 3, 0, 1, 0, 0, 0, o, 0, 0, 0, 0, 0, 0, 0};
  return {'M', 'M', 0, 42, 0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3, 0, 0, 0, 1, 0, o, 0, 0, 0, 0, 0, 0};
}

struct JpegOptions {
  J_COLOR_SPACE space = JCS_RGB;
  int channels = 3;
  bool progressive = false;
  int quality = 98;
  Bytes tiff = {};
};

// `samples` is [height, width, channels].
Bytes make_jpeg(int width, int height, const Bytes& samples, const JpegOptions& options = {}) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &buffer, &size);
  info.image_width = static_cast<JDIMENSION>(width);
  info.image_height = static_cast<JDIMENSION>(height);
  info.input_components = options.channels;
  info.in_color_space = options.space;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, options.quality, TRUE);
  if (options.progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  if (!options.tiff.empty()) {
    Bytes block = {'E', 'x', 'i', 'f', 0, 0};
    block.insert(block.end(), options.tiff.begin(), options.tiff.end());
    jpeg_write_marker(&info, JPEG_APP0 + 1, block.data(), static_cast<unsigned>(block.size()));
  }
  for (int y = 0; y < height; ++y) {
    auto* row = const_cast<JSAMPLE*>(samples.data() + static_cast<std::size_t>(y * width * options.channels));
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  Bytes bytes(buffer, buffer + size);
  jpeg_destroy_compress(&info);
  std::free(buffer);
  return bytes;
}

struct PngOptions {
  int depth = 8;
  int color_type = PNG_COLOR_TYPE_RGB;
  bool interlaced = false;
  std::vector<png_color> palette = {};
  Bytes palette_alpha = {};
  Bytes tiff = {};
};

// `rows` is [height, bytes per row] as the file holds them.
Bytes make_png(int width, int height, const Bytes& rows, const PngOptions& options = {}) {
  Bytes bytes;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &bytes,
      [](png_structp p, png_bytep data, std::size_t n) {
        auto& out = *static_cast<Bytes*>(png_get_io_ptr(p));
        out.insert(out.end(), data, data + n);
      },
      [](png_structp) {});
  png_set_IHDR(png, info, static_cast<png_uint_32>(width), static_cast<png_uint_32>(height), options.depth,
               options.color_type, options.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (!options.palette.empty())
    png_set_PLTE(png, info, options.palette.data(), static_cast<int>(options.palette.size()));
  if (!options.palette_alpha.empty()) {
    png_set_tRNS(png, info, options.palette_alpha.data(), static_cast<int>(options.palette_alpha.size()), nullptr);
  }
  Bytes tiff = options.tiff;
  if (!tiff.empty()) png_set_eXIf_1(png, info, static_cast<png_uint_32>(tiff.size()), tiff.data());
  std::vector<png_bytep> pointers;
  const std::size_t stride = rows.size() / static_cast<std::size_t>(height);
  for (int y = 0; y < height; ++y)
    pointers.push_back(const_cast<png_bytep>(rows.data() + static_cast<std::size_t>(y) * stride));
  png_set_rows(png, info, pointers.data());
  png_write_png(png, info, PNG_TRANSFORM_IDENTITY, nullptr);
  png_destroy_write_struct(&png, &info);
  return bytes;
}

std::string message_of(const Bytes& bytes, const DecodeLimits& limits = {}) {
  try {
    decode_image(bytes, "photo.bin", limits);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(EncodePng, RoundTripsEveryPixel) {
  for (const auto& [width, height] : std::vector<std::pair<int, int>>{{1, 1}, {3, 2}, {1, 300}, {257, 31}}) {
    const Image image = noise(width, height, 7);
    EXPECT_EQ(decode_image(encode_png(image), "noise"), image);
  }
}

TEST(EncodePng, RefusesAnImageThatDoesNotHoldItsPixels) {
  Image image(4, 4);
  image.pixels.pop_back();
  EXPECT_THROW(encode_png(image), Error);
  EXPECT_THROW(encode_png(Image()), Error);
}

TEST(DecodePng, ReadsGreyOfEveryDepth) {
  const Image eight = decode_image(make_png(3, 1, {0, 100, 255}, {.color_type = PNG_COLOR_TYPE_GRAY}), "grey");
  EXPECT_EQ(eight.pixels, (Bytes{0, 0, 0, 100, 100, 100, 255, 255, 255}));
  const Image one = decode_image(make_png(3, 1, {0b01000000}, {.depth = 1, .color_type = PNG_COLOR_TYPE_GRAY}), "bits");
  EXPECT_EQ(one.pixels, (Bytes{0, 0, 0, 255, 255, 255, 0, 0, 0}));
  const Bytes words = {0x00, 0x80, 0x12, 0xff, 0xff, 0xff};  // 128, 4863 and 65535 of 65535
  const Image sixteen = decode_image(make_png(3, 1, words, {.depth = 16, .color_type = PNG_COLOR_TYPE_GRAY}), "16");
  EXPECT_EQ(sixteen.pixels, (Bytes{0, 0, 0, 19, 19, 19, 255, 255, 255}));
}

TEST(DecodePng, RoundsSixteenBitColour) {
  const Bytes words = {0x12, 0xff, 0x80, 0x80, 0xff, 0x00};
  EXPECT_EQ(decode_image(make_png(1, 1, words, {.depth = 16}), "rgb16").pixels, (Bytes{19, 128, 254}));
}

TEST(DecodePng, LaysTransparencyOnWhite) {
  const Bytes rgba = {10, 20, 30, 255, 10, 20, 30, 0, 0, 0, 0, 51};
  const Image image = decode_image(make_png(3, 1, rgba, {.color_type = PNG_COLOR_TYPE_RGB_ALPHA}), "rgba");
  EXPECT_EQ(image.pixels, (Bytes{10, 20, 30, 255, 255, 255, 204, 204, 204}));
  const Image grey = decode_image(make_png(2, 1, {0, 255, 0, 0}, {.color_type = PNG_COLOR_TYPE_GRAY_ALPHA}), "la");
  EXPECT_EQ(grey.pixels, (Bytes{0, 0, 0, 255, 255, 255}));
}

TEST(DecodePng, LooksPalettesUpAlsoTransparentOnes) {
  PngOptions options = {
      .depth = 2, .color_type = PNG_COLOR_TYPE_PALETTE, .palette = {{1, 2, 3}, {40, 50, 60}, {7, 8, 9}}};
  const Bytes row = {0b00011000};  // entries 0, 1, 2
  EXPECT_EQ(decode_image(make_png(3, 1, row, options), "palette").pixels, (Bytes{1, 2, 3, 40, 50, 60, 7, 8, 9}));
  options.palette_alpha = {255, 0};
  EXPECT_EQ(decode_image(make_png(3, 1, row, options), "palette").pixels, (Bytes{1, 2, 3, 255, 255, 255, 7, 8, 9}));
}

TEST(DecodePng, ReadsInterlacedImages) {
  const Image image = noise(19, 23, 3);
  EXPECT_EQ(decode_image(make_png(19, 23, image.pixels, {.interlaced = true}), "adam7"), image);
}

TEST(DecodeJpeg, ReadsBaselineAndProgressive) {
  const Image image = gradient(48, 32);
  EXPECT_LE(largest_difference(decode_image(make_jpeg(48, 32, image.pixels), "jpeg"), image), 12);
  EXPECT_LE(largest_difference(decode_image(make_jpeg(48, 32, image.pixels, {.progressive = true}), "jpeg"), image),
            12);
}

TEST(DecodeJpeg, RepeatsGrey) {
  const Image image = decode_image(make_jpeg(16, 16, Bytes(256, 77), {.space = JCS_GRAYSCALE, .channels = 1}), "grey");
  for (const std::uint8_t value : image.pixels) EXPECT_NEAR(value, 77, 2);
}

TEST(DecodeJpeg, ReadsInvertedCmyk) {
  Bytes samples;  // as Adobe writes them: 255 is no ink
  for (int i = 0; i < 256; ++i) samples.insert(samples.end(), {255, 128, 0, 204});
  const Image image = decode_image(make_jpeg(16, 16, samples, {.space = JCS_CMYK, .channels = 4}), "cmyk");
  EXPECT_NEAR(image.pixels[0], 204, 3);
  EXPECT_NEAR(image.pixels[1], 102, 3);
  EXPECT_NEAR(image.pixels[2], 0, 3);
}

// Corners of the picture as a viewer shows it, for each way in which the file may hold it.
TEST(Orientation, StandsEveryWayOfHoldingTheCameraUpright) {
  // A 3 x 2 file; letters are pixels.   a b c
  //                                     d e f
  const char* const expected[] = {"abcdef", "cbafed", "fedcba", "defabc", "adbecf", "daebfc", "fcebda", "cfbead"};
  const Bytes letters = {'a', 'a', 'a', 'b', 'b', 'b', 'c', 'c', 'c', 'd', 'd', 'd', 'e', 'e', 'e', 'f', 'f', 'f'};
  for (int orientation = 1; orientation <= 8; ++orientation) {
    for (const bool little : {true, false}) {
      const Image image = decode_image(make_png(3, 2, letters, {.tiff = exif(orientation, little)}), "turned");
      std::string seen;
      for (std::size_t i = 0; i < image.pixels.size(); i += 3) seen += static_cast<char>(image.pixels[i]);
      EXPECT_EQ(seen, expected[orientation - 1]) << orientation;
      EXPECT_EQ(image.width, orientation >= 5 ? 2 : 3);
    }
  }
}

TEST(Orientation, IsReadFromJpeg) {
  const Image image = gradient(48, 32);
  const Image turned = decode_image(make_jpeg(48, 32, image.pixels, {.tiff = exif(6, true)}), "jpeg");
  ASSERT_EQ(turned.width, 32);
  ASSERT_EQ(turned.height, 48);
  EXPECT_GT(turned.at(0, 0)[1], 230);  // the left bottom corner of the file comes to the left top
  EXPECT_LT(turned.at(31, 0)[1], 25);
}

TEST(Orientation, IgnoresNonsense) {
  const Image image = noise(3, 2, 5);
  for (const int orientation : {0, 9, 255}) {
    EXPECT_EQ(decode_image(make_png(3, 2, image.pixels, {.tiff = exif(orientation, true)}), "x"), image);
  }
  std::mt19937 random(11);
  for (int i = 0; i < 500; ++i) {
    Bytes tiff = exif(1, i % 2 == 0);
    for (std::size_t at = 4; at < 10; ++at) tiff[at] = static_cast<std::uint8_t>(random());
    EXPECT_EQ(decode_image(make_jpeg(8, 8, noise(8, 8, 1).pixels, {.tiff = tiff}), "x").width, 8);
  }
}

TEST(BrokenImages, AreReportedByNameAtEveryLength) {
  const Image image = noise(9, 7, 2);
  const std::vector<Bytes> files = {encode_png(image), make_png(9, 7, image.pixels, {.interlaced = true}),
                                    make_jpeg(9, 7, image.pixels, {.tiff = exif(3, true)}),
                                    make_jpeg(9, 7, image.pixels, {.progressive = true}),
                                    make_jpeg(9, 7, Bytes(9 * 7 * 4, 99), {.space = JCS_CMYK, .channels = 4})};
  for (const Bytes& file : files) {
    for (std::size_t length = 0; length < file.size(); ++length) {
      const std::string message = message_of(Bytes(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length)));
      ASSERT_NE(message.find("photo.bin"), std::string::npos) << length << " of " << file.size() << ": " << message;
    }
  }
}

TEST(BrokenImages, WithFlippedBytesDecodeOrFailButNothingWorse) {
  const Image image = noise(24, 17, 4);
  const std::vector<Bytes> files = {
      encode_png(image), make_png(24, 17, image.pixels, {.interlaced = true}), make_jpeg(24, 17, image.pixels),
      make_jpeg(24, 17, image.pixels, {.progressive = true, .quality = 40, .tiff = exif(5, false)})};
  std::mt19937 random(9);
  const DecodeLimits limits = {.max_pixels = 1 << 16};
  int decoded = 0;
  for (const Bytes& file : files) {
    for (int round = 0; round < 400; ++round) {
      Bytes broken = file;
      for (unsigned flips = 1 + random() % 4; flips > 0; --flips) {
        broken[random() % broken.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
      }
      try {
        const Image result = decode_image(broken, "flipped", limits);
        EXPECT_EQ(result.pixels.size(), static_cast<std::size_t>(result.width * result.height * 3));
        ++decoded;
      } catch (const Error&) {
      }
    }
  }
  EXPECT_GT(decoded, 0);  // JPEG carries no checksum
}

TEST(BrokenImages, ThatAreNoImagesAreNamed) {
  EXPECT_NE(message_of({}).find("empty"), std::string::npos);
  EXPECT_NE(message_of({'h', 'e', 'l', 'l', 'o'}).find("not a JPEG"), std::string::npos);
  const TemporaryFolder folder;
  EXPECT_THROW(load_image(folder.path()), Error);
  EXPECT_THROW(load_image(folder.path() / "missing.jpg"), Error);
}

// The CRC-32 that closes every chunk of a PNG.
std::uint32_t png_checksum(std::span<const std::uint8_t> bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const std::uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

TEST(Bombs, AreRefusedByTheirHeader) {
  Bytes png = encode_png(noise(2, 2, 1));
  for (const std::size_t side : {16U, 20U}) {  // width and height, big endian: 50000
    png[side + 2] = 50000 >> 8;
    png[side + 3] = 50000 & 255;
  }
  const std::uint32_t crc = png_checksum(std::span(png).subspan(12, 17));
  for (std::size_t i = 0; i < 4; ++i) png[29 + i] = static_cast<std::uint8_t>(crc >> (24 - 8 * i));
  EXPECT_NE(message_of(png).find("50000x50000"), std::string::npos) << message_of(png);

  Bytes jpeg = make_jpeg(8, 8, noise(8, 8, 1).pixels);
  const Bytes frame = {0xFF, 0xC0, 0x00, 0x11, 0x08};
  const auto at = std::search(jpeg.begin(), jpeg.end(), frame.begin(), frame.end());
  ASSERT_NE(at, jpeg.end());
  const Bytes sides = {0xFD, 0xE8, 0xFD, 0xE8};  // 65000 each
  std::copy(sides.begin(), sides.end(), at + 5);
  const DecodeLimits limits = {.max_pixels = std::int64_t{32} << 20};  // more than an eighth of the sides would have
  EXPECT_NE(message_of(jpeg, limits).find("65000x65000"), std::string::npos) << message_of(jpeg, limits);
}

TEST(DecodeJpeg, AboveTheLimitBecomesSmaller) {
  const Image image = gradient(48, 32);
  const auto decoded = [](const Bytes& bytes, std::int64_t max_pixels) {
    return decode_image(bytes, "jpeg", {.max_pixels = max_pixels});
  };
  const Bytes whole = make_jpeg(48, 32, image.pixels);
  EXPECT_EQ(decoded(whole, 48 * 32).width, 48);
  for (const int part : {2, 4, 8}) {
    // One pixel less than the next larger part has.
    const Image smaller = decoded(whole, 48 * 32 / (part * part / 4) - 1);
    ASSERT_EQ(smaller.width, 48 / part);
    ASSERT_EQ(smaller.height, 32 / part);
    const std::uint8_t* expected = image.at(part / 2, part / 2);
    for (int c = 0; c < 3; ++c) EXPECT_NEAR(smaller.at(0, 0)[c], expected[c], 24) << part;
  }
  EXPECT_NE(message_of(whole, {.max_pixels = 6 * 4 - 1}).find("48x32"), std::string::npos);
  const Image turned = decoded(make_jpeg(48, 32, image.pixels, {.tiff = exif(6, true)}), 48 * 32 - 1);
  EXPECT_EQ(turned.width, 16);
  EXPECT_EQ(turned.height, 24);
  const Bytes cmyk = make_jpeg(16, 16, Bytes(16 * 16 * 4, 99), {.space = JCS_CMYK, .channels = 4});
  EXPECT_EQ(decoded(cmyk, 255).width, 8);
  // All of a progressive file would be in memory.
  const Bytes progressive = make_jpeg(48, 32, image.pixels, {.progressive = true});
  EXPECT_NE(message_of(progressive, {.max_pixels = 48 * 32 - 1}).find("limit"), std::string::npos);
}

TEST(Bombs, TheLimitIsTheCallers) {
  const Bytes png = encode_png(noise(10, 10, 1));
  EXPECT_EQ(message_of(png, {.max_pixels = 100}), "");
  EXPECT_NE(message_of(png, {.max_pixels = 99}).find("limit"), std::string::npos);
}

#ifdef VIOLIN_HAVE_WEBP
TEST(DecodeWebp, ReadsLosslessFilesAndReportsTruncatedOnes) {
  const Image image = noise(21, 13, 6);
  std::uint8_t* buffer = nullptr;
  const std::size_t size = WebPEncodeLosslessRGB(image.pixels.data(), 21, 13, 21 * 3, &buffer);
  const Bytes bytes(buffer, buffer + size);
  WebPFree(buffer);
  EXPECT_EQ(decode_image(bytes, "webp"), image);
  for (std::size_t length = 0; length + 1 < bytes.size(); ++length) {
    EXPECT_NE(message_of(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length))), "") << length;
  }
}

TEST(DecodeWebp, LaysTransparencyOnWhite) {
  const Bytes rgba = {10, 20, 30, 255, 10, 20, 30, 0};
  std::uint8_t* buffer = nullptr;
  const std::size_t size = WebPEncodeLosslessRGBA(rgba.data(), 2, 1, 8, &buffer);
  const Bytes bytes(buffer, buffer + size);
  WebPFree(buffer);
  EXPECT_EQ(decode_image(bytes, "webp").pixels, (Bytes{10, 20, 30, 255, 255, 255}));
}

Bytes webp_chunk(const char* letters, const Bytes& content) {
  Bytes chunk(letters, letters + 4);
  for (int i = 0; i < 4; ++i) chunk.push_back(static_cast<std::uint8_t>(content.size() >> 8 * i));
  chunk.insert(chunk.end(), content.begin(), content.end());
  if (content.size() % 2 != 0) chunk.push_back(0);
  return chunk;
}

// The extended format: the picture's own chunk between one for the features and one for EXIF.
Bytes with_exif(const Bytes& webp, std::uint8_t width, std::uint8_t height, const Bytes& block) {
  const auto low = [](std::uint8_t side) { return static_cast<std::uint8_t>(side - 1); };
  Bytes content = {'W', 'E', 'B', 'P'};
  const auto add = [&](const Bytes& bytes) { content.insert(content.end(), bytes.begin(), bytes.end()); };
  add(webp_chunk("VP8X", {8, 0, 0, 0, low(width), 0, 0, low(height), 0, 0}));
  add(Bytes(webp.begin() + 12, webp.end()));
  add(webp_chunk("EXIF", block));
  return webp_chunk("RIFF", content);
}

// Some programs put the six bytes into a WebP file that belong in front of the block in a JPEG file.
TEST(Orientation, IsReadFromWebpWithAndWithoutThePrefixOfJpeg) {
  const Image image = noise(3, 2, 5);
  std::uint8_t* buffer = nullptr;
  const std::size_t size = WebPEncodeLosslessRGB(image.pixels.data(), 3, 2, 9, &buffer);
  const Bytes bytes(buffer, buffer + size);
  WebPFree(buffer);
  const Image turned = decode_image(make_png(3, 2, image.pixels, {.tiff = exif(6, true)}), "png");
  Bytes block = exif(6, true);
  EXPECT_EQ(decode_image(with_exif(bytes, 3, 2, block), "webp"), turned);
  const Bytes prefix = {'E', 'x', 'i', 'f', 0, 0};
  block.insert(block.begin(), prefix.begin(), prefix.end());
  EXPECT_EQ(decode_image(with_exif(bytes, 3, 2, block), "webp"), turned);
  EXPECT_EQ(decode_image(with_exif(bytes, 3, 2, prefix), "webp"), image);
}
#endif

}  // namespace
}  // namespace violin
