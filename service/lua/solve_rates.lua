-- What the attempts at each task were worth: by task, kept also of groups that zero_variance drops.
--
-- SOLVE_RATES has sums by task; SOLVE_ORDER the number of each task's last change. Beyond MAX_TASKS, the task whose last attempt is the
-- longest ago is forgotten.

local MAX_TASKS = 100000
local SOLVED = 1 -- the least reward of a solved attempt

-- A member ended. `rewards` of its group: of the members that have one; it may be left to the trainer.
local function add_reward(r, g)
  if r.reward == nil then return end
  local s = g.rewards or { rewarded = 0, solved = 0, sum = 0, lowest = r.reward, highest = r.reward }
  s.rewarded, s.sum = s.rewarded + 1, s.sum + r.reward
  s.lowest, s.highest = math.min(s.lowest, r.reward), math.max(s.highest, r.reward)
  if r.reward >= SOLVED then s.solved = s.solved + 1 end
  g.rewards = s
end

-- Whether the rewards of the members that ended differ. One that is left to the trainer may.
local function rewards_vary(g)
  local s = g.rewards
  return not s or s.rewarded < g.ended or s.lowest ~= s.highest
end

-- The last member of a group ended.
local function add_solve_rate(g)
  local s, of_task = g.rewards or {}, load(SOLVE_RATES, g.task_id) or { groups = 0, rollouts = 0, rewarded = 0, solved = 0, sum = 0 }
  of_task.groups, of_task.rollouts = of_task.groups + 1, of_task.rollouts + g.ended
  for _, name in ipairs({ 'rewarded', 'solved', 'sum' }) do of_task[name] = of_task[name] + (s[name] or 0) end
  save(SOLVE_RATES, g.task_id, of_task)
  call('ZADD', SOLVE_ORDER, call('HINCRBY', JOB, 'solve_changes', 1), g.task_id)
  if call('ZCARD', SOLVE_ORDER) > MAX_TASKS then call('HDEL', SOLVE_RATES, call('ZPOPMIN', SOLVE_ORDER)[1]) end
end
