// A game's end of `penstock serve` and `penstock serve-env` in C++17, over clients/c/penstock_game.c.
//
//   penstock::Game game({.port = 8900, .seats = 2});   // C++20; in C++17 set the fields of penstock::Options
//   auto obs = game.column<float>("obs");
//   obs.in(game.add_row(0, penstock::first))[0] = 0.5f; // seat 0 begins an episode, and sees this
//   if (!game.step()) game.reconnect();                 // all seats begin anew then
//   if (auto action = game.action<std::int64_t>(0)) move(action[0]);
//
// What a game can correct is a std::invalid_argument; a service that refuses or does not answer is a penstock::Error.
#ifndef PENSTOCK_GAME_HPP
#define PENSTOCK_GAME_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "penstock_game.h"

namespace penstock {

constexpr unsigned first = PENSTOCK_FIRST;           // an episode begins
constexpr unsigned terminated = PENSTOCK_TERMINATED; // the last action has ended it
constexpr unsigned truncated = PENSTOCK_TRUNCATED;   // it is cut off, by a limit of time for example
constexpr unsigned leaves = PENSTOCK_LEAVES;         // the seat is gone; the row's observation is not read

// Why a service cannot be played at: it refuses the game, or nobody answers.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8800; // where `penstock serve` listens; serve-env has 8900
  std::uint32_t seats = 1;   // episodes that are played at a time
  std::string token = {};
  std::string observation = {}; // the spaces of the game as JSON; empty: those of the service are right
  std::string action = {};
  std::string name = {};
  double patience_s = 60; // so long connecting is tried again
};

// Elements that lie in a row; false where there is no row.
template <class T>
class Span {
 public:
  Span(T *data, std::size_t size) : data_(data), size_(data ? size : 0) {}
  T *data() const { return data_; }
  std::size_t size() const { return size_; }
  T *begin() const { return data_; }
  T *end() const { return data_ + size_; }
  T &operator[](std::size_t index) const { return data_[index]; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  T *data_;
  std::size_t size_;
};

// One array of each row, with elements of type T.
template <class T>
class Column {
  static_assert(std::is_arithmetic_v<T>, "a column has numbers");

 public:
  // Throws std::invalid_argument if its elements are no T.
  explicit Column(const penstock_column &column) : offset_(column.offset), count_(column.count) {
    char kind = column.dtype[1];
    bool is_float = kind == 'f';
    bool is_signed = is_float || kind == 'i';
    bool is_same = sizeof(T) == column.nbytes && is_float == std::is_floating_point_v<T>;
    if (!is_same || is_signed != std::is_signed_v<T>)
      throw std::invalid_argument("column " + std::string(column.name) + " has the dtype " + column.dtype +
                                  "; ask for it by that type");
  }
  std::size_t size() const { return count_; }
  Span<T> in(std::uint8_t *row) const { return {row ? reinterpret_cast<T *>(row + offset_) : nullptr, count_}; }
  Span<const T> in(const std::uint8_t *row) const {
    return {row ? reinterpret_cast<const T *>(row + offset_) : nullptr, count_};
  }

 private:
  std::size_t offset_, count_;
};

// A connection. It can be moved, not copied; its end leaves the service.
class Game {
 public:
  explicit Game(const Options &options) {
    auto given = [](const std::string &text) { return text.empty() ? nullptr : text.c_str(); };
    penstock_options plain{};
    plain.host = options.host.c_str();
    plain.port = options.port;
    plain.seats = options.seats;
    plain.token = given(options.token);
    plain.observation = given(options.observation);
    plain.action = given(options.action);
    plain.name = given(options.name);
    plain.patience_s = options.patience_s;
    char error[PENSTOCK_ERROR_NBYTES];
    game_.reset(penstock_connect(&plain, error));
    if (!game_) throw Error(error);
  }

  const penstock_welcome &welcome() const { return *penstock_welcome_of(game_.get()); }

  // Columns hold until the next reconnect.
  template <class T>
  Column<T> column(const std::string &name = "obs") const {
    const penstock_column *found = penstock_find_column(game_.get(), name.c_str());
    if (!found) throw std::invalid_argument("the observation has no column " + name + "; see WELCOME");
    return Column<T>(*found);
  }

  // Adds a row to the next STEP, and returns its bytes, zeros to be filled before `send`; nullptr if the connection
  // is lost. Throws std::invalid_argument if the seat cannot have a row now.
  std::uint8_t *add_row(std::uint32_t seat, unsigned flags = 0, float reward = 0) {
    std::uint8_t *row = penstock_row(game_.get(), seat, flags, reward);
    if (!row && penstock_is_connected(game_.get())) throw std::invalid_argument(error());
    return row;
  }

  // All three return false if the connection is lost.
  bool send() { return penstock_send(game_.get()) == 0; }
  bool wait(double seconds = -1) { return penstock_wait(game_.get(), seconds) >= 0; }
  bool step() { return penstock_step(game_.get()) == 0; }

  penstock_phase phase(std::uint32_t seat) const { return penstock_phase_of(game_.get(), seat); }

  // Returns the action for the last row of a seat; false if it has none. Throws as `column` does.
  template <class T>
  Span<const T> action(std::uint32_t seat) const {
    return Column<T>(welcome().action).in(action_bytes(seat));
  }
  const std::uint8_t *action_bytes(std::uint32_t seat) const { return penstock_action(game_.get(), seat); }

  // Connects again, after increasing pauses: all seats begin anew. Throws Error when patience ends.
  void reconnect() {
    if (penstock_reconnect(game_.get())) throw Error(error());
  }

  // The sentence of the last fault of a seat, or of what ended the connection.
  std::string error() const { return penstock_error(game_.get()); }

 private:
  struct Close {
    void operator()(penstock_game *game) const { penstock_close(game); }
  };
  std::unique_ptr<penstock_game, Close> game_;
};

}  // namespace penstock

#endif
