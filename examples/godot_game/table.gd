# Juggle: a racket keeps a ball in the air. The game's own physics, once in a tick of the engine.
#
# Lengths are halves of the table's width, seconds are those of the game. The ball falls, bounces off the walls, and
# leaves the racket with the same speed upwards; the racket's place decides where to.
extends Node2D

const HEIGHT = 1.2
const RACKET_HALF = 0.16
const RACKET_SPEED = 1.6
const RACKET_ACCELERATION = 16.0
const GRAVITY = 4.0
const BOUNCE_SPEED = 2.0  # upwards, so a flight takes a second
const SIDE_SPEED = 0.7  # after a hit by the end of the racket
const MOST_BOUNCES = 10  # the best return of an episode
const SCALE = 120.0  # pixels

enum {STAY, LEFT, RIGHT}

var action = STAY
# What happened since it was taken.
var bounces = 0
var reward = 0.0
var is_missed = false

var _ball = Vector2()
var _speed = Vector2()
var _racket = 0.0
var _racket_speed = 0.0


# Begin an episode: the ball falls from somewhere.
func begin():
	action = STAY
	bounces = 0
	reward = 0.0
	is_missed = false
	_ball = Vector2(rand_range(-0.9, 0.9), rand_range(0.7, 1.0))
	_speed = Vector2(rand_range(-0.5, 0.5), 0.0)
	_racket = 0.0
	_racket_speed = 0.0


func is_over():
	return is_missed or bounces == MOST_BOUNCES


# Returns what the player sees, all numbers of about 1.
func observe():
	return [_ball.x, _ball.y, _speed.x, _speed.y / BOUNCE_SPEED, _racket, _racket_speed / RACKET_SPEED]


# Returns the reward since the last call.
func take_reward():
	var taken = reward
	reward = 0.0
	return taken


# Move by one tick of the engine.
func tick(delta):
	if is_over():
		return
	var wanted = 0.0
	if action == LEFT:
		wanted = -RACKET_SPEED
	elif action == RIGHT:
		wanted = RACKET_SPEED
	_racket_speed = move_toward(_racket_speed, wanted, RACKET_ACCELERATION * delta)
	_racket = clamp(_racket + _racket_speed * delta, -1.0, 1.0)

	_speed.y -= GRAVITY * delta
	_ball += _speed * delta
	if abs(_ball.x) > 1.0:
		_ball.x = 2.0 * sign(_ball.x) - _ball.x
		_speed.x = -_speed.x
	if _ball.y > 0.0 or _speed.y > 0.0:
		return

	# The ball has come down to the racket.
	var offset = (_ball.x - _racket) / RACKET_HALF
	if abs(offset) > 1.0:
		is_missed = true
		return
	_ball.y = 0.0
	_speed = Vector2(SIDE_SPEED * offset, BOUNCE_SPEED)
	bounces += 1
	reward += 1.0


func _process(_delta):
	update()


func _draw():
	draw_rect(Rect2(-SCALE, -HEIGHT * SCALE, 2 * SCALE, HEIGHT * SCALE), Color(1, 1, 1, 0.06))
	var racket = Rect2((_racket - RACKET_HALF) * SCALE, 4, 2 * RACKET_HALF * SCALE, 6)
	draw_rect(racket, Color(1, 0.72, 0.42))
	draw_circle(Vector2(_ball.x, -_ball.y) * SCALE, 6, Color.white)
